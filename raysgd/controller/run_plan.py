"""The plan of a run, and its state when an earlier controller process died. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.policies.after_failure import Failure
from raysgd.controller.states import Outcome

if TYPE_CHECKING:
    from raysgd.checkpoint.format.manifest import Manifest
    from raysgd.checkpoint.retention import Record
    from raysgd.controller.policies.live import CopiedStart, LiveStart


@dataclass(frozen=True)
class Start:
    """Where an attempt starts: a checkpoint, or the run's initial state, and the counters at that point.

    Attributes:
        uri: The checkpoint on storage.
        held: The manifest of the checkpoint in the cluster's memory, which is preferred to the one on storage.
        live: The complete step that survivors hold, which is preferred to both.
        copied: The complete step of which ``held`` is a copy; None for a checkpoint.
        skipped: A line for each newer checkpoint of an earlier run that is damaged.
    """

    uri: str | None = None
    iteration: int = 0
    time_total_s: float = 0.0
    number: int = 0
    held: Manifest | None = None
    live: LiveStart | None = None
    copied: CopiedStart | None = None
    skipped: tuple[str, ...] = ()

    @property
    def is_checkpoint(self) -> bool:
        return self.uri is not None or self.held is not None or self.live is not None

    @property
    def place(self) -> dict[str, Any]:
        """The place of the state, for the record of an attempt: storage, the cluster's memory, or that of survivors."""
        step = self.live or self.copied
        memory = None if self.held is None or step is not None else self.number
        return {"checkpoint": self.uri, "memory": memory, "live": None if step is None else list(step.id)}


#: Distance between the last frame number in the journal and the first one after a restart. A reader may have received frames
#: that were never written, and asks for the frames after those.
SEQ_GAP = 10**9


@dataclass(frozen=True)
class AttemptRecord:
    """The last attempt of a run, recorded before any rank enters it, so that its number is never used again."""

    run_id: str
    attempt: int
    world_size: int
    iterations_before: int


@dataclass(frozen=True)
class PreviousState:
    """The state of a run when its controller's process died.

    Attributes:
        frames: All frames of the journal except reports.
        next_seq: A number above those of all frames that were ever sent.
        attempt: The number of the last attempt; 0 if there was none.
        is_open: The last attempt had not ended.
        iterations_before: Iterations before the last attempt.
        size: The number of ranks of the last attempt.
        failures: The failures of the run.
        manifests: The manifests on storage, oldest first.
        last_number: The highest number of a checkpoint folder, complete or not.
        known: The iterations of the checkpoints that readers know, by number.
        is_paused: The run was paused.
        requested: How the run must end because that was requested; None otherwise.
        published: How the run has ended; None if it has not.
        started_s: When the run began, in seconds since the epoch; 0 if its files do not say so.
    """

    frames: tuple[Frame, ...] = ()
    next_seq: int = 0
    attempt: int = 0
    is_open: bool = False
    iterations_before: int = 0
    size: int | None = None
    failures: tuple[Failure, ...] = ()
    manifests: tuple[Manifest, ...] = ()
    last_number: int = 0
    known: Mapping[int, int] = field(default_factory=dict)
    is_paused: bool = False
    requested: Outcome | None = None
    published: Outcome | None = None
    started_s: float = 0.0

    @property
    def bound_size(self) -> int | None:
        """The only number of ranks that can load the newest checkpoint; None: any number can."""
        newest = self.manifests[-1] if self.manifests else None
        return newest.world_size if newest is not None and newest.all_ranks and not newest.is_reshardable else None

    def up_to(self, last: AttemptRecord | None) -> PreviousState:
        """Return this state with the last attempt, which the journal may not contain."""
        if last is None or last.attempt <= self.attempt:
            return self
        return replace(
            self,
            attempt=last.attempt,
            is_open=True,
            iterations_before=last.iterations_before,
            size=last.world_size,
        )


def build_previous_state(
    journal: Iterable[Frame], last_seq: int, manifests: Sequence[Manifest], last_number: int
) -> PreviousState:
    """Build the previous state of a run from its files.

    Args:
        journal: The frames of the journal without reports, in order.
        last_seq: The number of the last frame in the journal, including reports.
        manifests: The manifests on storage, oldest first.
        last_number: The highest number of a checkpoint folder.
    """
    frames_read = tuple(journal)
    attempt, size, is_open, iterations_before = 0, None, False, 0
    for frame in frames_read:
        if frame.kind == frames.ATTEMPT:
            attempt, size, is_open = frame.attempt, int(frame.data["world_size"]), True
            iterations_before = frame.data["iterations_before"]
        elif frame.kind == frames.ATTEMPT_END:
            is_open = False
    events = [(frame.data["kind"], frame.data["data"]) for frame in frames_read if frame.kind == frames.EVENT]
    ends = [Outcome(frame.data["kind"]) for frame in frames_read if frame.kind == frames.RUN_END]
    cancels = [Outcome("cancelled", message=data["why"]) for name, data in events if name == "cancel"]
    stops = [Outcome("stopped", message=data["why"]) for name, data in events if name == "stop"]
    pauses = [name for name, _ in events if name in ("paused", "resumed")]
    starts = [
        frame.data["timestamp"]
        for frame in frames_read
        if frame.kind == frames.EVENT and frame.data["kind"] == "run_start"
    ]
    checkpoints = (frames.CHECKPOINT, frames.CHECKPOINT_SCORED)
    return PreviousState(
        frames=frames_read,
        next_seq=last_seq + SEQ_GAP,
        attempt=attempt,
        is_open=is_open,
        iterations_before=iterations_before,
        size=size,
        failures=tuple(_failure(data) for name, data in events if name == "failure"),
        manifests=tuple(manifests),
        last_number=max([last_number, *(manifest.number for manifest in manifests)]),
        known={frame.data["number"]: frame.data["iteration"] for frame in frames_read if frame.kind in checkpoints},
        is_paused=pauses[-1:] == ["paused"],
        requested=next(reversed(cancels or stops), None),
        published=ends[-1] if ends else None,
        started_s=next(iter(starts), 0.0),
    )


def _failure(data: dict[str, Any]) -> Failure:
    return Failure(tuple(data["ranks"]), data["error"], tuple(data["nodes"]), data.get("raised", ""))


@dataclass(frozen=True)
class RunPlan:
    """The settings of a `raysgd.controller.state_machine.run_machine.RunMachine`.

    Attributes:
        start: Where the first attempt starts.
        reduce: How a checkpoint's metrics are computed from those of all ranks.
        previous: What an earlier controller process left; None: the run begins.
        grows_without_save: See `raysgd.backends.base.BackendConfig`.
        workers_per_replica: See `raysgd.config.ScalingConfig`.
        earlier: Checkpoints of earlier runs that count for retention, by numbers below 1.
    """

    failure: FailureConfig
    checkpoint: CheckpointConfig
    start: Start = field(default_factory=Start)
    reduce: Mapping[str, str] = field(default_factory=dict)
    previous: PreviousState | None = None
    grows_without_save: bool = False
    workers_per_replica: int = 1
    earlier: Sequence[Record] = ()
