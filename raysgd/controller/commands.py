"""The inputs and commands of the run's state machine: plain records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.backends.flight_recorder import Collective
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.controller.states import Outcome
from raysgd.session.events import Failed, WorkerEvent

# -- inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupReady:
    """All workers are ready for the attempt.

    Attributes:
        nodes: The node of each rank.
        num_joining: Further worker processes that are ready and could join an elastic group.
    """

    nodes: tuple[str, ...]
    num_joining: int = 0


@dataclass(frozen=True)
class GroupFailed:
    """The workers could not get ready.

    Attributes:
        can_retry: Another try may succeed: workers died while they started.
        ranks: The ranks of the workers that died, as far as they had one.
        is_announced: The workers died because they were preempted.
    """

    error_type: str
    message: str
    can_retry: bool
    ranks: tuple[int, ...] = ()
    is_announced: bool = False


@dataclass(frozen=True)
class JoiningWorkerReady:
    """A further worker process is ready and could join an elastic group."""


@dataclass(frozen=True)
class EventReceived:
    """A worker's event stream delivered an event."""

    rank: int
    attempt: int
    event: WorkerEvent


@dataclass(frozen=True)
class ReportsReceived:
    """A rank has made ``num_reports`` reports in the attempt so far. The reports themselves go to the readers directly."""

    rank: int
    attempt: int
    num_reports: int


@dataclass(frozen=True)
class StreamEnded:
    """A worker's event stream has ended. ``death`` is the reason if the worker's process died, or None."""

    rank: int
    attempt: int
    death: str | None = None


@dataclass(frozen=True)
class WorkerHung:
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
class NodeDraining:
    """The node of these ranks will be taken away, ``within_s`` seconds from now if that is known."""

    attempt: int
    ranks: tuple[int, ...]
    within_s: float | None = None


@dataclass(frozen=True)
class CheckpointCommitted:
    """A checkpoint's manifest is on storage."""

    manifest: Manifest


@dataclass(frozen=True)
class CommitFailed:
    """A checkpoint's manifest could not be written."""

    number: int
    error: str


@dataclass(frozen=True)
class MemoryCopyLost:
    """A checkpoint is no longer in the cluster's memory, or the group cannot read it there."""

    number: int


@dataclass(frozen=True)
class MemoryCopyStored:
    """A checkpoint's parts were written from the cluster's memory to storage."""

    manifest: Manifest


@dataclass(frozen=True)
class MemoryCopyNotStored:
    """A checkpoint's parts could not be written from the cluster's memory to storage."""

    number: int
    error: str


@dataclass(frozen=True)
class StopRequested:
    """End the run early.

    Attributes:
        cancel: End all ranks at once, instead of at their next ``should_stop()`` or report.
        failed: The error of the callback that requested the stop, if an error was the reason.
    """

    why: str
    cancel: bool
    failed: Failed | None = None


@dataclass(frozen=True)
class PauseRequested:
    """Pause the run at the next checkpoint."""


@dataclass(frozen=True)
class ResumeRequested:
    """Resume a paused run, or withdraw the request to pause it."""


@dataclass(frozen=True)
class TimerFired:
    """A timer has run out. ``serial``: the group that it was set for."""

    timer: str
    serial: int


Input = (
    GroupReady
    | GroupFailed
    | JoiningWorkerReady
    | EventReceived
    | ReportsReceived
    | StreamEnded
    | WorkerHung
    | NodeDraining
    | CheckpointCommitted
    | CommitFailed
    | MemoryCopyLost
    | MemoryCopyStored
    | MemoryCopyNotStored
    | StopRequested
    | PauseRequested
    | ResumeRequested
    | TimerFired
)

# -- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrepareGroup:
    """Start or replace workers until the group is ready; then `GroupReady` or `GroupFailed`.

    Attributes:
        keep_size: Keep the number of workers, because only so many ranks can load the newest checkpoint.
    """

    attempt: int
    keep_size: bool = False


@dataclass(frozen=True)
class StartAttempt:
    """Call train_func on all ranks.

    Attributes:
        checkpoint: URI of the checkpoint to start from, if it is on storage.
        first_number: The number of the checkpoint that the first save of the attempt makes.
        held: The manifest of the checkpoint to start from, if it is in the cluster's memory.
    """

    attempt: int
    checkpoint: str | None
    first_number: int
    iterations_before: int
    time_before_s: float
    held: Manifest | None = None


@dataclass(frozen=True)
class EndAttempt:
    """End the attempt on these ranks; train_func gets `raysgd.errors.AttemptEnded`."""

    attempt: int
    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class KillWorkers:
    """Kill the processes of these ranks and drop their event streams. ``is_lost``: their node does not answer."""

    ranks: tuple[int, ...]
    is_lost: bool = False


@dataclass(frozen=True)
class RequestStop:
    """Make ``should_stop()`` true on all ranks. ``ends_reports``: a rank that does not check it leaves at a report."""

    attempt: int
    ends_reports: bool = True


@dataclass(frozen=True)
class AgreeOnSavePoint:
    """Make all ranks wait after the same save, where each sends `raysgd.session.events.AtSavePoint`."""

    attempt: int


@dataclass(frozen=True)
class CancelSavePoint:
    """Cancel the save point; ranks that wait there resume."""

    attempt: int


@dataclass(frozen=True)
class LeaveGroup:
    """Leave the process group on all ranks, because all of them returned."""

    attempt: int


@dataclass(frozen=True)
class ReleaseWorkers:
    """Stop all workers and release their resources."""


@dataclass(frozen=True)
class CommitCheckpoint:
    """Write this manifest; then `CheckpointCommitted` or `CommitFailed`. ``amend``: it replaces a committed one, no answer."""

    manifest: Manifest
    amend: bool = False


@dataclass(frozen=True)
class DeleteCheckpoint:
    """Delete a checkpoint from storage."""

    number: int


@dataclass(frozen=True)
class KeepInMemory:
    """Keep this checkpoint in the cluster's memory, on a second node as well, and release all older ones."""

    number: int


@dataclass(frozen=True)
class StoreFromMemory:
    """Write a checkpoint from the cluster's memory to storage; then `MemoryCopyStored` or `MemoryCopyNotStored`."""

    manifest: Manifest


@dataclass(frozen=True)
class SetTimer:
    """Send `TimerFired` after ``delay_s`` seconds."""

    timer: str
    serial: int
    delay_s: float


@dataclass(frozen=True)
class EmitFrame:
    """Send a frame to all readers of the run."""

    kind: str
    attempt: int
    rank: int = -1
    data: dict[str, Any] = field(default_factory=dict)
    rows: bytes = b""


@dataclass(frozen=True)
class RecordEvent:
    """Write an event to ``events.jsonl`` and send it to callbacks."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishOutcome:
    """Send the run's outcome to all readers."""

    outcome: Outcome


@dataclass(frozen=True)
class CloseRun:
    """Close the run: nothing is left to do."""


Command = (
    PrepareGroup
    | StartAttempt
    | EndAttempt
    | KillWorkers
    | RequestStop
    | AgreeOnSavePoint
    | CancelSavePoint
    | LeaveGroup
    | ReleaseWorkers
    | CommitCheckpoint
    | DeleteCheckpoint
    | KeepInMemory
    | StoreFromMemory
    | SetTimer
    | EmitFrame
    | RecordEvent
    | PublishOutcome
    | CloseRun
)
