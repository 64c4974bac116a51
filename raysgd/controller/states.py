"""The states of a run, each with the data it needs.

=============  ==============================================  ==================================================
state          meaning                                         leaves for
=============  ==============================================  ==================================================
Preparing      workers are started, replaced, made ready       Running; Closing (they cannot be had)
Running        train_func runs on all ranks                    Closing (all returned); Ending (anything else)
Ending         survivors are being brought out of the attempt  Preparing (retry), Paused; Closing (error, stop, cancel)
Paused         the workers are given back                      Preparing (resume); Closing (stop, cancel)
Closing        the outcome is known; pending writes go on      Closed
Closed         nothing is left to do
=============  ==============================================  ==================================================

The outcome is told to the readers on entering Closing when it is an error (raised first, cleaned up after), and on
leaving it when it is a success (``run`` returns only when pending writes are durable).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raysgd.session.events import Failed

#: Stands for the node where an error was raised by a callback on the controller's side.
CALLBACK_NODE = "the process of the controller's callbacks"


@dataclass
class Preparing:
    """Workers are being had for ``attempt``, as the group number ``serial`` of the run."""

    attempt: int
    serial: int = 1


@dataclass
class Running:
    """train_func runs.

    Attributes:
        attempt: Its number. It is taken when a rank has entered train_func: a group that does not form leaves it to the next.
        serial: The number of the group, of which there is one for each try.
        iterations_before: Rounds before this attempt.
        inside: Ranks whose stream has not ended.
        num_ranks: Ranks at the beginning.
        ended: Ranks that left without returning, after a stop was asked for.
        parked: Ranks whose train_func waits for the next attempt, each with the round that its state stands after.
        time_before_s: Training time before this attempt.
        begun_s: When it began, by the machine's clock.
        is_entered: Whether any rank has entered train_func.
    """

    attempt: int
    serial: int
    iterations_before: int
    inside: set[int]
    num_ranks: int
    ended: set[int] = field(default_factory=set)
    parked: dict[int, int | None] = field(default_factory=dict)
    time_before_s: float = 0.0
    begun_s: float = 0.0
    is_entered: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether no rank has left."""
        return not self.ended and self.num_ranks == len(self.inside)


@dataclass(frozen=True)
class Death:
    """A process that is gone, seen at ``timestamp``, or was found to hang and ended then."""

    rank: int
    timestamp: float
    reason: str
    is_hang: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        kind: ``"done"``, ``"stopped"`` (a success too: it was asked to end, and did), ``"cancelled"`` or ``"error"``.
        failed: The user's exception, for an error that is one.
        rank: Its rank.
        node: The node of that rank.
        followed: ``(rank, one line)`` of the errors that followed from it.
        error_type: Name in `raysgd.errors` of an error that is raysgd's own.
        message: Its text; for a run that was stopped or cancelled the reason.
        ranks: The ranks it began with.
        failures: How many failures the run had, where they are the reason.
    """

    kind: str
    failed: Failed | None = None
    rank: int | None = None
    node: str = ""
    followed: tuple[tuple[int, str], ...] = ()
    error_type: str | None = None
    message: str = ""
    ranks: tuple[int, ...] = ()
    failures: int = 0


@dataclass
class Ending:
    """Why the attempt ended is settled when the errors of all ranks are in, or have had time to come.

    Attributes:
        preset: The outcome, where it does not depend on what the ranks say.
        failures: What each rank raised, in the order of arrival.
        arrived: When each arrived.
        is_settled: A retry was decided; only the ranks inside and the pending writes are waited for.
        is_grace_over: Who has not left had the time to, and is ended as soon as it is known why the attempt has ended.
    """

    running: Running
    preset: Outcome | None = None
    failures: dict[int, Failed] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    is_settled: bool = False
    is_grace_over: bool = False


@dataclass
class Paused:
    """The run rests before ``attempt``, whose group would be number ``serial``."""

    attempt: int
    serial: int


@dataclass
class Closing:
    """The outcome stands. ``running`` is the attempt that is being left, if there is one."""

    outcome: Outcome
    running: Running | None = None
    killed: set[int] = field(default_factory=set)


@dataclass
class Closed:
    """Over."""

    outcome: Outcome


State = Preparing | Running | Ending | Paused | Closing | Closed


def running_of(state: State) -> Running | None:
    """The data of the current attempt, if there is one that is not over."""
    running = state.running if isinstance(state, (Ending, Closing)) else state
    return running if isinstance(running, Running) else None


def has_ended_well(state: State) -> bool:
    """Whether the run is over without an error."""
    return isinstance(state, Closed) and state.outcome.kind in ("done", "stopped")


def name_of(state: State) -> str:
    """The state as users are told of it; of a run that is over, how it ended."""
    if isinstance(state, Closed):
        return state.outcome.kind
    names = {Preparing: "starting", Running: "running", Ending: "recovering", Paused: "paused", Closing: "ending"}
    return names[type(state)]
