"""The states of a run, each with its data. Pure.

=========  ===============================================  ====================================================
state      meaning                                          next states
=========  ===============================================  ====================================================
Preparing  workers are started, replaced and made ready     Running; Closing (workers cannot start)
Running    train_func runs on all ranks                     Closing (all ranks returned); Ending (anything else)
Ending     all ranks leave the attempt                      Preparing (retry); Paused; Closing (error, stop, cancel)
Paused     the workers are released                         Preparing (resume); Closing (stop, cancel)
Closing    the outcome is known; writes are still pending   Closed
Closed     nothing is left to do
=========  ===============================================  ====================================================

An error is published on entering Closing, before the workers have left. A success is published on leaving Closing, when
everything that was saved is durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raysgd.session.events import Failed

#: Stands for the node if a callback raised the error in the callback host.
CALLBACK_NODE = "the process of the controller's callbacks"


@dataclass
class Preparing:
    """Workers get ready for attempt ``attempt``, in group number ``serial`` of the run."""

    attempt: int
    serial: int = 1


@dataclass
class Running:
    """train_func runs.

    Attributes:
        attempt: Its number. A group that fails before any rank entered train_func does not use up the number.
        serial: The number of the group. Each try to form a group has a number of its own.
        iterations_before: Rounds before this attempt.
        nodes: The node of each rank.
        active: Ranks whose event stream has not ended.
        stopped: Ranks that left without returning, after a stop was requested.
        is_entered: Whether any rank has entered train_func.
        unsynchronized: Ranks that train a model of their own.
        holding: Ranks that have a live state.
    """

    attempt: int
    serial: int
    iterations_before: int
    nodes: tuple[str, ...]
    active: set[int]
    stopped: set[int] = field(default_factory=set)
    is_entered: bool = False
    unsynchronized: set[int] = field(default_factory=set)
    holding: set[int] = field(default_factory=set)

    @property
    def has_all_ranks(self) -> bool:
        """Whether no rank has left."""
        return not self.stopped and len(self.active) == len(self.nodes)

    @property
    def is_held(self) -> bool:
        """Whether all ranks may leave where they are, as the state of the newest step is in memory."""
        return len(self.holding) == len(self.nodes)


@dataclass(frozen=True)
class Death:
    """A process that died, or was found to hang. ``timestamp``: when the controller noticed it."""

    rank: int
    timestamp: float
    reason: str
    is_hang: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        kind: ``"done"``, ``"stopped"`` (ended early on request, a success too), ``"cancelled"`` or ``"error"``.
        failed: The user's exception, for an error that is one.
        rank: The rank that raised it; None: a callback raised it.
        node: The node of that rank, or `CALLBACK_NODE`.
        followed: ``(rank, summary)`` of the errors that followed from it.
        error_type: The name in `raysgd.errors`, for an error that raysgd raises itself.
        message: The text of that error, why the exception was not retried again, or why the run was stopped or cancelled.
        ranks: The ranks where the error began.
        failures: The number of failures of the run, if that ended it.
        key: The name of the metric that is missing, if that is the error.
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
    key: str = ""

    @property
    def is_success(self) -> bool:
        return self.kind in ("done", "stopped")

    def describe(self) -> str:
        """Return one line about the end, for the run's events."""
        if self.failed is None:
            return self.message
        place = self.node if self.rank is None else f"rank {self.rank}"
        return f"{place}: {self.failed.summary}"


@dataclass
class Ending:
    """All ranks leave the attempt. Its cause is decided when the errors of all ranks have arrived, or have had time to.

    Attributes:
        preset: The outcome, if it does not depend on the errors of the ranks.
        errors: What each rank raised, in the order of arrival, because the clocks of two machines may differ.
        arrived_at: When each error arrived, by the clock that deaths are noticed by.
        deaths: The processes that died, without those in ``killed``.
        killed: Ranks whose processes the controller killed.
        is_decided: The next attempt or a pause follows; only active ranks and pending writes are waited for.
        is_grace_over: Ranks that are still active are killed as soon as the cause is known.
    """

    running: Running
    preset: Outcome | None = None
    errors: dict[int, Failed] = field(default_factory=dict)
    arrived_at: dict[int, float] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    is_decided: bool = False
    is_grace_over: bool = False


@dataclass
class Paused:
    """The run is paused before attempt ``attempt``, whose group would have number ``serial``."""

    attempt: int
    serial: int


@dataclass
class Closing:
    """The outcome is known. ``running`` is the attempt that the ranks leave, if there is one."""

    outcome: Outcome
    running: Running | None = None


@dataclass
class Closed:
    """The run is over."""

    outcome: Outcome


State = Preparing | Running | Ending | Paused | Closing | Closed


def running_of(state: State) -> Running | None:
    """Return the current attempt, or None if no attempt has begun or the last one is over."""
    running = state.running if isinstance(state, (Ending, Closing)) else state
    return running if isinstance(running, Running) else None


def has_succeeded(state: State) -> bool:
    """Return whether the run is over without an error."""
    return isinstance(state, Closed) and state.outcome.is_success


def name_of(state: State) -> str:
    """Return the state's name for users; for a run that is over, the kind of its outcome."""
    if isinstance(state, Closed):
        return state.outcome.kind
    names = {Preparing: "starting", Running: "running", Ending: "recovering", Paused: "paused", Closing: "ending"}
    return names[type(state)]
