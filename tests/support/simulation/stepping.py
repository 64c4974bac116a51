"""The state machine of a run, stepped by hand: a test sets the clock, delivers the inputs and reads the commands."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.run_plan import PreviousState, RunPlan, Start
from raysgd.controller.state_machine.run_machine import RunMachine
from raysgd.controller.states import Closed, Outcome
from raysgd.session import events as e
from support.simulation.events import RETURNED, part, saved

#: Promised numbers, written out.
GATHER_S = 0.05

C = TypeVar("C", bound=c.Command)


def uri_of(number: int) -> str:
    """Return the folder of a simulated checkpoint."""
    return f"/run/checkpoint_{number}"


class SimulatedRun:
    """A `RunMachine` with the commands so far and its timers.

    Attributes:
        now: The time by which timers fire.
        clock_error_s: By how much the machine's clock is ahead of it, as after a correction of the node's clock.
        was_clock_corrected: Times before and after a correction cannot be compared.
        commands: All commands, in order.
    """

    def __init__(
        self,
        num_ranks: int = 2,
        *,
        start: Start | None = None,
        failure_config: FailureConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        reduce: Mapping[str, str] | None = None,
        past: PreviousState | None = None,
        grows_without_save: bool = False,
    ) -> None:
        self.now = 1000.0
        self.clock_error_s = 0.0
        self.was_clock_corrected = False
        self.commands: list[c.Command] = []
        self.num_ranks = num_ranks
        self.attempt = 0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, c.TimerFired]] = []
        self._num_answered = 0
        self._plan = RunPlan(
            failure_config or FailureConfig(),
            checkpoint_config or CheckpointConfig(),
            start or Start(),
            reduce or {},
            past,
            grows_without_save,
        )
        self._begin()

    def restart(self, past: PreviousState) -> None:
        """Restart the controller's process; the commands so far are kept."""
        self._plan = replace(self._plan, previous=past)
        self._timers.clear()
        self._num_answered = len(self.all_of(c.CommitCheckpoint))
        self._begin()

    def _begin(self) -> None:
        self.machine = RunMachine(self._plan, uri_of=uri_of, clock=lambda: self.now + self.clock_error_s)
        self._keep(self.machine.step(c.RunBegins()))

    # -- in -----------------------------------------------------------------------------------------------------------

    def feed(self, given: c.Input) -> list[c.Command]:
        """Step the machine; return the commands of this step."""
        return self._keep(self.machine.step(given))

    def ready(self, *, enters: bool = True) -> list[c.Command]:
        """Make all workers ready; they enter train_func if an attempt starts. Return the commands before that."""
        nodes = tuple(f"node{rank}" for rank in range(self.num_ranks))
        commands = self.feed(c.GroupReady(nodes))
        if enters and any(isinstance(command, c.StartAttempt) for command in commands):
            for rank in range(self.num_ranks):
                self.deliver(rank, e.Entered(self.now))
        return commands

    def deliver(self, rank: int, *events: e.WorkerEvent, attempt: int | None = None) -> list[c.Command]:
        """Deliver a worker's events, by default of the last attempt."""
        given = self.attempt if attempt is None else attempt
        commands: list[c.Command] = []
        for event in events:
            commands += self.feed(c.EventReceived(rank, given, event))
        return commands

    def end_stream(self, rank: int, died: str | None = None, *, attempt: int | None = None) -> list[c.Command]:
        """End a worker's event stream. ``died``: the reason, if its process died."""
        return self.feed(c.StreamEnded(rank, self.attempt if attempt is None else attempt, died))

    def leave(self, rank: int, event: e.WorkerEvent = RETURNED) -> None:
        """Deliver a worker's last event and end its stream."""
        self.deliver(rank, event)
        self.end_stream(rank)

    def save(self, call: int = 0, reports: int = 1, ranks: Iterator[int] | None = None, **flags: Any) -> None:
        """Make all ranks save; their parts are durable at once."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self.deliver(rank, saved(call, reports, **flags), part(call))

    def commit(self) -> None:
        """Complete all commits that are pending."""
        for command in self.unanswered():
            self.feed(c.CheckpointCommitted(command.manifest))

    def fail_commit(self, error: str = "disk full") -> None:
        """Fail all commits that are pending."""
        for command in self.unanswered():
            self.feed(c.CommitFailed(command.manifest.number, error))

    def stop(self, *, cancel: bool = False, grace_s: float | None = None) -> list[c.Command]:
        return self.feed(c.StopRequested("enough", cancel, grace_s=grace_s))

    def advance(self, seconds: float) -> None:
        """Advance the clock; timers fire when they are due."""
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._timers)
            self.feed(timer)
        self.now = until

    # -- out ----------------------------------------------------------------------------------------------------------

    def all_of(self, kind: type[C]) -> list[C]:
        return [command for command in self.commands if isinstance(command, kind)]

    def unanswered(self) -> list[c.CommitCheckpoint]:
        """Return the commits since the last call; the caller answers them."""
        commits = self.all_of(c.CommitCheckpoint)
        new, self._num_answered = commits[self._num_answered :], len(commits)
        return new

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [command.data for command in self.all_of(c.RecordEvent) if command.kind == kind]

    def emitted(self, kind: str) -> list[c.EmitFrame]:
        return [command for command in self.all_of(c.EmitFrame) if command.kind == kind]

    @property
    def entries(self) -> list[c.StartAttempt]:
        return self.all_of(c.StartAttempt)

    @property
    def prepared_attempts(self) -> list[int]:
        """The number of the next attempt, each time that the workers were prepared for one."""
        return [command.attempt for command in self.all_of(c.PrepareGroup)]

    @property
    def keeps_size(self) -> bool:
        """Whether the workers were last prepared with the same number of them as before."""
        return self.all_of(c.PrepareGroup)[-1].keep_size

    @property
    def killed_ranks(self) -> list[int]:
        """The ranks whose processes the run has killed, in order."""
        return [rank for command in self.all_of(c.KillWorkers) for rank in command.ranks]

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether ``should_stop()`` is true on the ranks of the last attempt."""
        return any(command.attempt == self.attempt for command in self.all_of(c.RequestStop))

    @property
    def num_save_points(self) -> int:
        """The number of times that the ranks were asked to wait after the same save."""
        return len(self.all_of(c.AgreeOnSavePoint))

    @property
    def has_save_point(self) -> bool:
        """Whether the ranks of the last attempt were asked to wait after the same save, and that was not cancelled since."""
        asked = [command for command in self.commands if isinstance(command, (c.AgreeOnSavePoint, c.CancelSavePoint))]
        return bool(asked) and isinstance(asked[-1], c.AgreeOnSavePoint) and asked[-1].attempt == self.attempt

    @property
    def outcome(self) -> Outcome | None:
        """The published outcome, or None."""
        published = self.all_of(c.PublishOutcome)
        assert len(published) <= 1
        return published[0].outcome if published else None

    @property
    def is_closed(self) -> bool:
        assert isinstance(self.machine.state, Closed) == bool(self.all_of(c.CloseRun))
        return isinstance(self.machine.state, Closed)

    @property
    def frames(self) -> list[Frame]:
        """The frames that readers get, numbered."""
        emitted = [command for command in self.all_of(c.EmitFrame) if command.kind != frames.EVENT]
        return [
            Frame(seq, command.kind, command.attempt, command.rank, command.data, command.rows)
            for seq, command in enumerate(emitted)
        ]

    def _keep(self, commands: list[c.Command]) -> list[c.Command]:
        self.commands += commands
        for command in commands:
            if isinstance(command, c.StartAttempt):
                self.attempt = command.attempt
            elif isinstance(command, c.SetTimer):
                timer = c.TimerFired(command.timer, command.serial)
                heapq.heappush(self._timers, (self.now + command.delay_s, next(self._order), timer))
        return commands


def running(num_ranks: int = 2, **settings: object) -> SimulatedRun:
    """Return a run whose first attempt is running."""
    run = SimulatedRun(num_ranks, **settings)  # type: ignore[arg-type]
    run.ready()
    return run


def kill(run: SimulatedRun, rank: int = 0) -> None:
    """Kill a worker; the others leave the attempt."""
    run.end_stream(rank, "killed")
    run.advance(GATHER_S)
    for other in set(range(run.num_ranks)) - {rank}:
        run.leave(other, e.Ended())


def finish(run: SimulatedRun) -> None:
    """Make all ranks return, and complete the pending commits."""
    for rank in range(run.num_ranks):
        run.leave(rank)
    run.commit()
