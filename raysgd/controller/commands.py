"""The inputs and commands of the run's state machine: plain records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.backends.flight_recorder import Collective
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.controller.run_plan import Start
from raysgd.controller.states import CALLBACK_NODE, Outcome
from raysgd.session.events import Failed, LiveReport, WorkerEvent

# -- inputs -----------------------------------------------------------------------------------------------------------


class Input:
    """Something that happened: the state machine makes one step for each input."""


@dataclass(frozen=True)
class RunBegins(Input):
    """The first input: the run begins, or is resumed from what an earlier controller process has left."""


@dataclass(frozen=True)
class GroupReady(Input):
    """All workers are ready for the attempt.

    Attributes:
        nodes: The node of each rank.
        num_joining: Further worker processes that are ready and could join an elastic group.
        live: What the processes have of the run's live state, by rank.
    """

    nodes: tuple[str, ...]
    num_joining: int = 0
    live: Mapping[int, LiveReport] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupFailed(Input):
    """The workers could not get ready.

    Attributes:
        can_retry: Another try may succeed: workers died while they started.
        ranks: The ranks of the workers that died, without those that had no rank yet.
        is_announced: The workers died because they were preempted.
    """

    error_type: str
    message: str
    can_retry: bool
    ranks: tuple[int, ...] = ()
    is_announced: bool = False


@dataclass(frozen=True)
class JoiningWorkerReady(Input):
    """A further worker process is ready and could join an elastic group."""


@dataclass(frozen=True)
class EventReceived(Input):
    """A worker's event stream delivered an event."""

    rank: int
    attempt: int
    event: WorkerEvent


@dataclass(frozen=True)
class StreamEnded(Input):
    """A worker's event stream has ended. ``death`` is the reason if the worker's process died, or None."""

    rank: int
    attempt: int
    death: str | None = None


@dataclass(frozen=True)
class WorkerHung(Input):
    """A worker hangs and must be killed.

    Attributes:
        kind: As in `raysgd.controller.policies.hang.Hang`.
        why: One sentence for the user.
        stacks: The stack of each rank.
        collectives: The last collectives of each rank.
    """

    rank: int
    attempt: int
    kind: str
    why: str
    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Sequence[Collective]] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectivesMismatched(Input):
    """Ranks wait in collectives that other ranks will never join: the run must end.

    Attributes:
        ranks: The ranks that wait.
        why: What they wait in, and for whom.
        stacks: The stack of each rank.
        collectives: The last collectives of each rank.
    """

    attempt: int
    ranks: tuple[int, ...]
    why: str
    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Sequence[Collective]] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the run: the program is wrong."""
        message = (
            f"the ranks do not make the same collectives: {self.why}. Make the same number of steps on every rank, as with "
            "raysgd.torch.prepare_data_loader or get_dataset(), and call collectives on all ranks in the same order, with the "
            "same sizes and dtypes"
        )
        return Outcome("error", error_type="CollectiveMismatchError", message=message, ranks=self.ranks)


@dataclass(frozen=True)
class NodeDraining(Input):
    """The node of these ranks will be taken away, ``within_s`` seconds from now if that is known."""

    attempt: int
    ranks: tuple[int, ...]
    within_s: float | None = None


@dataclass(frozen=True)
class CheckpointCommitted(Input):
    """A checkpoint's manifest is on storage, which took ``seconds``."""

    manifest: Manifest
    seconds: float = 0.0


@dataclass(frozen=True)
class CommitFailed(Input):
    """A checkpoint's manifest could not be written."""

    number: int
    error: str


@dataclass(frozen=True)
class MemoryCopyLost(Input):
    """A checkpoint is no longer in the cluster's memory, or the group cannot read it there."""

    number: int


@dataclass(frozen=True)
class MemoryCopyStored(Input):
    """A checkpoint's parts were written from the cluster's memory to storage."""

    manifest: Manifest


@dataclass(frozen=True)
class MemoryCopyNotStored(Input):
    """A checkpoint's parts could not be written from the cluster's memory to storage."""

    number: int
    error: str


@dataclass(frozen=True)
class StopRequested(Input):
    """End the run early. Ranks that check ``should_stop()`` find it true, and leave in their own way.

    Attributes:
        cancel: End all ranks at once; ``should_stop()`` is not waited for.
        failed: The error of the callback that requested the stop, if an error was the reason.
        is_fault: An error of the controller itself is the reason.
        grace_s: Seconds to save and leave: other ranks leave at their next save, and the run is cancelled after that. None:
            other ranks leave at a report.
    """

    why: str
    cancel: bool
    failed: Failed | None = None
    grace_s: float | None = None
    is_fault: bool = False

    @property
    def outcome(self) -> Outcome:
        """The outcome of the run, if it ends by this request."""
        if self.is_fault:
            return Outcome("error", error_type="WorkerError", message=self.why)
        if self.failed is not None:
            return Outcome("error", failed=self.failed, node=CALLBACK_NODE)
        return Outcome("cancelled" if self.cancel else "stopped", message=self.why)


@dataclass(frozen=True)
class PauseRequested(Input):
    """Pause the run at the next checkpoint."""


@dataclass(frozen=True)
class ResumeRequested(Input):
    """Resume a paused run, or withdraw the request to pause it."""


@dataclass(frozen=True)
class TimerFired(Input):
    """A timer has run out. ``serial``: the group that it was set for."""

    timer: str
    serial: int


# -- commands ---------------------------------------------------------------------------------------------------------


class Command:
    """Something that the executor must do for the state machine."""


@dataclass(frozen=True)
class PrepareGroup(Command):
    """Start or replace workers until the group is ready; `GroupReady` or `GroupFailed` follows.

    Attributes:
        keep_size: Keep the number of workers, because only so many ranks can load the newest checkpoint.
    """

    attempt: int
    keep_size: bool = False


@dataclass(frozen=True)
class StartAttempt(Command):
    """Call train_func on all ranks.

    Attributes:
        first_number: The number of the checkpoint that the first save of the attempt makes.
    """

    attempt: int
    start: Start
    first_number: int


@dataclass(frozen=True)
class EndAttempt(Command):
    """End the attempt on these ranks; train_func gets `raysgd.errors.AttemptEnded`."""

    attempt: int
    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class KillWorkers(Command):
    """Kill the processes of these ranks and drop their event streams. ``is_lost``: their node does not answer."""

    ranks: tuple[int, ...]
    is_lost: bool = False


@dataclass(frozen=True)
class RequestStop(Command):
    """Make ``should_stop()`` true on all ranks. ``ends_reports``: ranks that do not check it leave at their next report."""

    attempt: int
    ends_reports: bool = True


@dataclass(frozen=True)
class AgreeOnSavePoint(Command):
    """Make all ranks wait after the same save, where each sends `raysgd.session.events.AtSavePoint` with this ``point``."""

    attempt: int
    point: int


@dataclass(frozen=True)
class CancelSavePoint(Command):
    """Cancel the save point; ranks that wait there resume."""

    attempt: int


@dataclass(frozen=True)
class LeaveGroup(Command):
    """Leave the process group on all ranks, because all of them returned."""


@dataclass(frozen=True)
class ReleaseWorkers(Command):
    """Stop all workers and release their resources."""


@dataclass(frozen=True)
class CommitCheckpoint(Command):
    """Write this manifest; `CheckpointCommitted` or `CommitFailed` follows."""

    manifest: Manifest


@dataclass(frozen=True)
class WriteRound(Command):
    """Write the round of a committed checkpoint, which this manifest has."""

    manifest: Manifest


@dataclass(frozen=True)
class DeleteCheckpoint(Command):
    """Delete a checkpoint from storage."""

    number: int


@dataclass(frozen=True)
class DeleteEarlier(Command):
    """Delete checkpoints of earlier runs from storage, once nothing needs them; see `RunPlan.earlier`."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class KeepInMemory(Command):
    """Keep this checkpoint in the cluster's memory, on a second node as well, and release all older ones."""

    number: int


@dataclass(frozen=True)
class StoreFromMemory(Command):
    """Write a checkpoint from the cluster's memory to storage; `MemoryCopyStored` or `MemoryCopyNotStored` follows."""

    manifest: Manifest


@dataclass(frozen=True)
class SetTimer(Command):
    """Send `TimerFired` after ``delay_s`` seconds."""

    timer: str
    serial: int
    delay_s: float


@dataclass(frozen=True)
class EmitFrame(Command):
    """Send a frame to all readers of the run."""

    kind: str
    attempt: int
    rank: int = -1
    data: dict[str, Any] = field(default_factory=dict)
    rows: bytes = b""


@dataclass(frozen=True)
class RecordEvent(Command):
    """Write an event to ``events.jsonl`` and send it to callbacks."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


def warning(message: str, **data: Any) -> RecordEvent:
    """Return the command that records a warning for the user, with more data for programs."""
    return RecordEvent("warning", {"message": message, **data})


def states_event(kind: str, data: dict[str, Any], given: WorkerHung | CollectivesMismatched) -> RecordEvent:
    """Return the command that records an event with the stacks of all ranks and their last collectives."""
    data["stacks"] = {str(rank): stack for rank, stack in given.stacks.items()}
    collectives = {str(rank): [one.to_json() for one in last] for rank, last in given.collectives.items() if last}
    return RecordEvent(kind, {**data, "collectives": collectives} if collectives else data)


@dataclass(frozen=True)
class PublishOutcome(Command):
    """Send the run's outcome to all readers."""

    outcome: Outcome


@dataclass(frozen=True)
class CloseRun(Command):
    """Close the run: nothing is left to do."""
