"""What is known of a run that goes on in another process of the controller: its journal, and its checkpoints on storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raysgd.controller import frames
from raysgd.controller.failure_policy import Failure
from raysgd.controller.frames import Frame

if TYPE_CHECKING:
    from raysgd.checkpoint.manifest import Manifest

#: Between the last number in the journal and the first one given after it. A reader may have seen frames that never came to
#: storage; it asks for what follows those.
SEQ_GAP = 10**9


@dataclass(frozen=True)
class AttemptRecord:
    """The last attempt of a run, laid down before anybody enters it: its number is never given again."""

    run_id: str
    attempt: int
    world_size: int
    iterations_before: int


@dataclass(frozen=True)
class Past:
    """A run up to the moment at which its controller's process died.

    Attributes:
        frames: All in the journal but the reports.
        next_seq: A number above those of all frames that were ever told.
        attempt: The number of the last attempt; 0 if there was none.
        is_open: That attempt had not ended.
        iterations_before: Iterations before it.
        size: Its ranks.
        failures: All of the run.
        manifests: Of the checkpoints on storage, oldest first.
        last_number: The highest number that a checkpoint was written under, whether or not it came to be one.
        known: The numbers of the checkpoints that readers were told of.
        why_stopped: What it was asked to stop for; None if it was not.
        why_cancelled: What it was to be ended at once for; None if it was not.
        is_paused: It rests.
        kind: How it ended; None if it has not.
    """

    frames: tuple[Frame, ...] = ()
    next_seq: int = SEQ_GAP
    attempt: int = 0
    is_open: bool = False
    iterations_before: int = 0
    size: int | None = None
    failures: tuple[Failure, ...] = ()
    manifests: tuple[Manifest, ...] = ()
    last_number: int = 0
    known: frozenset[int] = field(default_factory=frozenset)
    why_stopped: str | None = None
    why_cancelled: str | None = None
    is_paused: bool = False
    kind: str | None = None

    @property
    def bound_size(self) -> int | None:
        """How many ranks can go on from the newest checkpoint; None: any number."""
        newest = self.manifests[-1] if self.manifests else None
        return newest.world_size if newest is not None and newest.all_ranks and not newest.is_reshardable else None

    def up_to(self, last: AttemptRecord | None) -> Past:
        """With the last attempt, of which the journal may not have got to know."""
        if last is None or last.attempt <= self.attempt:
            return self
        return replace(
            self,
            attempt=last.attempt,
            is_open=True,
            iterations_before=last.iterations_before,
            size=last.world_size,
        )


def past_of(journal: Iterable[Frame], last_seq: int, manifests: Sequence[Manifest], last_number: int) -> Past:
    """Put together what the files say.

    Args:
        journal: The frames that are no reports, in their order.
        last_seq: The number of the last frame in the journal, reports included.
        manifests: Of the checkpoints on storage, oldest first.
        last_number: The highest number of a checkpoint's folder.
    """
    told = tuple(journal)
    attempt, size, is_open, iterations_before, kind = 0, None, False, 0, None
    for frame in told:
        if frame.kind == frames.ATTEMPT:
            attempt, size, is_open = frame.attempt, int(frame.data["world_size"]), True
            iterations_before = frame.data["iterations_before"]
        elif frame.kind == frames.ATTEMPT_END:
            is_open = False
        elif frame.kind == frames.RUN_END:
            kind = frame.data["kind"]
    events = [(frame.data["kind"], frame.data["data"]) for frame in told if frame.kind == frames.EVENT]
    stops = [data["why"] for name, data in events if name == "stop"]
    cancels = [data["why"] for name, data in events if name == "cancel"]
    rests = [name == "paused" for name, _ in events if name in ("paused", "resumed")]
    checkpoints = (frames.CHECKPOINT, frames.CHECKPOINT_SCORED)
    return Past(
        frames=told,
        next_seq=last_seq + SEQ_GAP,
        attempt=attempt,
        is_open=is_open,
        iterations_before=iterations_before,
        size=size,
        failures=tuple(_failure(data) for name, data in events if name == "failure"),
        manifests=tuple(manifests),
        last_number=max([last_number, *(manifest.number for manifest in manifests)]),
        known=frozenset(frame.data["number"] for frame in told if frame.kind in checkpoints),
        why_stopped=stops[-1] if stops else None,
        why_cancelled=cancels[-1] if cancels else None,
        is_paused=bool(rests) and rests[-1],
        kind=kind,
    )


def _failure(data: dict[str, object]) -> Failure:
    ranks, nodes = data.get("ranks", []), data.get("nodes", [])
    assert isinstance(ranks, list) and isinstance(nodes, list)
    return Failure(tuple(ranks), str(data.get("error", "")), tuple(nodes), str(data.get("raised", "")))
