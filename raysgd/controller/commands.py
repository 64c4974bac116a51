"""What goes into the machine and what comes out of it: plain records, both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.backends.flight_record import Collective
from raysgd.checkpoint.manifest import Manifest
from raysgd.controller.states import Outcome
from raysgd.session.events import Failed, WorkerEvent

# -- in -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupReady:
    """All workers are up and ready.

    Attributes:
        nodes: By rank.
        num_newcomers: Processes that are up as well, and not among them.
        num_parked: As many of the first ranks go on inside train_func.
    """

    nodes: tuple[str, ...]
    num_newcomers: int = 0
    num_parked: int = 0


@dataclass(frozen=True)
class GroupFailed:
    """They are not.

    Attributes:
        can_retry: Workers died while starting, rather than something that would happen again.
        ranks: Those who died, as far as they had a rank.
        is_announced: They were told to.
    """

    error_type: str
    message: str
    can_retry: bool
    ranks: tuple[int, ...] = ()
    is_announced: bool = False


@dataclass(frozen=True)
class NewcomerUp:
    """A process is up that an elastic group could take in."""


@dataclass(frozen=True)
class WorkerSaid:
    """An event of a worker's stream."""

    rank: int
    attempt: int
    event: WorkerEvent


@dataclass(frozen=True)
class WorkerGone:
    """A worker's stream has ended; ``died`` tells why if it is its process that ended."""

    rank: int
    attempt: int
    died: str | None = None


@dataclass(frozen=True)
class WorkerHung:
    """A worker must be ended: ``why`` tells the user, ``stacks`` where each rank stood, ``collectives`` what its last ones were;
    ``kind`` as in `hang_policy.Hang`.
    """

    rank: int
    attempt: int
    kind: str
    why: str
    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Sequence[Collective]] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeDrains:
    """The node of these ranks will be taken away; ``within_s`` seconds from now, where that is known."""

    attempt: int
    ranks: tuple[int, ...]
    within_s: float | None = None


@dataclass(frozen=True)
class Committed:
    """A checkpoint's manifest is on storage."""

    manifest: Manifest


@dataclass(frozen=True)
class CommitFailed:
    """It could not be written."""

    number: int
    error: str


@dataclass(frozen=True)
class HeldLost:
    """A checkpoint is in the cluster's memory no more, or not where the group could read it."""

    number: int


@dataclass(frozen=True)
class HeldStored:
    """A checkpoint's parts were written to storage from the cluster's memory."""

    manifest: Manifest


@dataclass(frozen=True)
class HeldNotStored:
    """They could not be."""

    number: int
    error: str


@dataclass(frozen=True)
class StopAsked:
    """End early and in peace (``cancel=False``), or at once; ``failed`` is the error of a callback that says so."""

    why: str
    cancel: bool
    failed: Failed | None = None


@dataclass(frozen=True)
class PauseAsked:
    """Rest, once there is a checkpoint of all that was done."""


@dataclass(frozen=True)
class ResumeAsked:
    """Go on after a rest, or do not begin one."""


@dataclass(frozen=True)
class TimeUp:
    """A timer that was set has run out. ``serial``: the group it was set for."""

    timer: str
    serial: int


Input = (
    GroupReady
    | GroupFailed
    | NewcomerUp
    | WorkerSaid
    | WorkerGone
    | WorkerHung
    | NodeDrains
    | Committed
    | CommitFailed
    | HeldLost
    | HeldStored
    | HeldNotStored
    | StopAsked
    | PauseAsked
    | ResumeAsked
    | TimeUp
)

# -- out ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrepareGroup:
    """Bring all workers up and make them ready.

    Attributes:
        keep_size: As many as before: the checkpoint that the attempt goes on from is bound to their number.
        parked: Ranks of the last group whose train_func goes on in the attempt; None: those of the try before.
    """

    attempt: int
    keep_size: bool = False
    parked: tuple[int, ...] | None = ()


@dataclass(frozen=True)
class Enter:
    """Enter train_func on all ranks.

    Attributes:
        checkpoint: Where the checkpoint to start from is on storage, if it is there.
        held: The same in the cluster's memory, if it is there.
    """

    attempt: int
    checkpoint: str | None
    first_number: int
    iterations_before: int
    time_before_s: float
    held: Manifest | None = None


@dataclass(frozen=True)
class EndRanks:
    """Tell these ranks that their attempt is over. ``goes_on``: there will be another one, which train_func may wait for."""

    attempt: int
    ranks: tuple[int, ...]
    why: str
    goes_on: bool = True


@dataclass(frozen=True)
class KillRanks:
    """End these ranks' processes, and wait for no more of what they say. ``is_lost``: their node does not answer."""

    ranks: tuple[int, ...]
    is_lost: bool = False


@dataclass(frozen=True)
class AskToStop:
    """Make ``should_stop()`` true on all ranks. ``ends_reports``: a rank that does not look leaves at a report."""

    attempt: int
    ends_reports: bool = True


@dataclass(frozen=True)
class AgreeOnSave:
    """Have all ranks leave after the same save; each says `AtSavePoint` when it waits there."""

    attempt: int


@dataclass(frozen=True)
class CallOffSave:
    """They leave after no save; those who wait go on."""

    attempt: int


@dataclass(frozen=True)
class ChangeGroup:
    """Have train_func leave its group inside, when it can; each rank is `Parked` then. ``stops``: else by ``should_stop()``."""

    attempt: int
    stops: bool = False


@dataclass(frozen=True)
class LeaveGroup:
    """All ranks returned: leave the process group."""

    attempt: int


@dataclass(frozen=True)
class ReleaseWorkers:
    """Give all workers back, those on their way too."""


@dataclass(frozen=True)
class Commit:
    """Write this manifest; then `Committed` or `CommitFailed`. ``amend``: it replaces one that is there."""

    manifest: Manifest
    amend: bool = False


@dataclass(frozen=True)
class DeleteCheckpoint:
    """Delete a checkpoint from storage."""

    number: int


@dataclass(frozen=True)
class Hold:
    """A checkpoint is in the cluster's memory; let go of all older ones."""

    number: int


@dataclass(frozen=True)
class StoreHeld:
    """Write a checkpoint that is in the cluster's memory to storage."""

    manifest: Manifest


@dataclass(frozen=True)
class SetTimer:
    """Feed `TimeUp` back after ``delay_s``."""

    timer: str
    serial: int
    delay_s: float


@dataclass(frozen=True)
class Say:
    """A frame for the readers of the run."""

    kind: str
    attempt: int
    rank: int = -1
    data: dict[str, Any] = field(default_factory=dict)
    rows: bytes = b""


@dataclass(frozen=True)
class Note:
    """An event for ``events.jsonl``, callbacks and display."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TellOutcome:
    """The run's outcome, for the readers."""

    outcome: Outcome


@dataclass(frozen=True)
class Close:
    """Nothing is left to do."""


Command = (
    PrepareGroup
    | Enter
    | EndRanks
    | KillRanks
    | AskToStop
    | AgreeOnSave
    | CallOffSave
    | ChangeGroup
    | LeaveGroup
    | ReleaseWorkers
    | Commit
    | DeleteCheckpoint
    | Hold
    | StoreHeld
    | SetTimer
    | Say
    | Note
    | TellOutcome
    | Close
)
