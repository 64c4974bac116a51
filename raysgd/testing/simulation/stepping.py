"""A run's state machine, stepped by hand: the clock is given, timers fire when a test says so, commands are kept."""

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
from raysgd.controller.machine import RunMachine
from raysgd.controller.moves import GATHER_S
from raysgd.controller.past import Past
from raysgd.controller.plan import RunPlan
from raysgd.controller.shelf import Start
from raysgd.controller.states import Closed, Outcome
from raysgd.session import events as e
from raysgd.testing.simulation.said import RETURNED, part, saved

C = TypeVar("C", bound=c.Command)


def uri_of(number: int) -> str:
    """Where a checkpoint of a simulated run would be."""
    return f"/run/checkpoint_{number}"


class SimulatedRun:
    """A `RunMachine`, what it commanded so far, and its timers.

    Attributes:
        now: The machine's clock.
        told: All commands, in order.
    """

    def __init__(
        self,
        num_ranks: int = 2,
        *,
        start: Start | None = None,
        failure: FailureConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        reduce: Mapping[str, str] | None = None,
        past: Past | None = None,
        recovers_inside: bool = False,
    ) -> None:
        self.now = 1000.0
        self.told: list[c.Command] = []
        self.num_ranks = num_ranks
        self.attempt = 0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, c.TimeUp]] = []
        self._num_answered = 0
        self._plan = RunPlan(
            failure or FailureConfig(),
            checkpoint or CheckpointConfig(),
            start or Start(),
            reduce or {},
            past,
            recovers_inside,
        )
        self._begin()

    def restart(self, past: Past) -> None:
        """The controller's process dies, and another goes on; what was told stays told."""
        self._plan = replace(self._plan, past=past)
        self._timers.clear()
        self._num_answered = len([command for command in self.all_of(c.Commit) if not command.amend])
        self._begin()

    def _begin(self) -> None:
        self.machine = RunMachine(self._plan, uri_of=uri_of, clock=lambda: self.now)
        self._keep(self.machine.begin())

    # -- in -----------------------------------------------------------------------------------------------------------

    def feed(self, given: c.Input) -> list[c.Command]:
        """Step the machine; returns the commands of this step."""
        return self._keep(self.machine.step(given))

    def ready(self, *, enters: bool = True, num_parked: int = 0) -> list[c.Command]:
        """All workers are up, and enter train_func if they are told to; returns what was commanded before."""
        nodes = tuple(f"node{rank}" for rank in range(self.num_ranks))
        commands = self.feed(c.GroupReady(nodes, num_parked=num_parked))
        if enters and any(isinstance(command, c.Enter) for command in commands):
            for rank in range(self.num_ranks):
                self.say(rank, e.Entered(self.now))
        return commands

    def say(self, rank: int, *events: e.WorkerEvent, attempt: int | None = None) -> list[c.Command]:
        """A worker says something; of the attempt entered last, if none is given."""
        given = self.attempt if attempt is None else attempt
        return [command for event in events for command in self.feed(c.WorkerSaid(rank, given, event))]

    def gone(self, rank: int, died: str | None = None, *, attempt: int | None = None) -> list[c.Command]:
        """A worker's stream ends; ``died``: because its process does."""
        return self.feed(c.WorkerGone(rank, self.attempt if attempt is None else attempt, died))

    def leave(self, rank: int, event: e.WorkerEvent = RETURNED) -> None:
        """A worker says its last word and its stream ends."""
        self.say(rank, event)
        self.gone(rank)

    def save(self, call: int = 0, reports: int = 1, ranks: Iterator[int] | None = None, **flags: Any) -> None:
        """All ranks save, and their parts are safe at once."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self.say(rank, saved(call, reports, **flags), part(call))

    def commit(self) -> None:
        """Storage does what it was asked to."""
        for command in self.unanswered():
            self.feed(c.Committed(command.manifest))

    def fail_commit(self, error: str = "disk full") -> None:
        """Storage does not."""
        for command in self.unanswered():
            self.feed(c.CommitFailed(command.manifest.number, error))

    def stop(self, *, cancel: bool = False) -> list[c.Command]:
        return self.feed(c.StopAsked("enough", cancel))

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire when they are due."""
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._timers)
            self.feed(timer)
        self.now = until

    # -- out ----------------------------------------------------------------------------------------------------------

    def all_of(self, kind: type[C]) -> list[C]:
        return [command for command in self.told if isinstance(command, kind)]

    def unanswered(self) -> list[c.Commit]:
        """Commits that storage has not answered yet; they count as answered from here on."""
        commits = [command for command in self.all_of(c.Commit) if not command.amend]
        new, self._num_answered = commits[self._num_answered :], len(commits)
        return new

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [note.data for note in self.all_of(c.Note) if note.kind == kind]

    def said(self, kind: str) -> list[c.Say]:
        return [say for say in self.all_of(c.Say) if say.kind == kind]

    @property
    def entries(self) -> list[c.Enter]:
        return self.all_of(c.Enter)

    @property
    def outcome(self) -> Outcome | None:
        """What the readers were told, once they were."""
        told = self.all_of(c.TellOutcome)
        assert len(told) <= 1
        return told[0].outcome if told else None

    @property
    def is_closed(self) -> bool:
        assert isinstance(self.machine.state, Closed) == bool(self.all_of(c.Close))
        return isinstance(self.machine.state, Closed)

    @property
    def frames(self) -> list[Frame]:
        """What the readers see, numbered."""
        return [
            Frame(seq, say.kind, say.attempt, say.rank, say.data, say.rows)
            for seq, say in enumerate(say for say in self.told if isinstance(say, c.Say) and say.kind != frames.EVENT)
        ]

    def _keep(self, commands: list[c.Command]) -> list[c.Command]:
        self.told += commands
        for command in commands:
            if isinstance(command, c.Enter):
                self.attempt = command.attempt
            elif isinstance(command, c.SetTimer):
                timer = c.TimeUp(command.timer, command.serial)
                heapq.heappush(self._timers, (self.now + command.delay_s, next(self._order), timer))
        return commands


def running(num_ranks: int = 2, **settings: object) -> SimulatedRun:
    """A run whose first attempt is under way."""
    run = SimulatedRun(num_ranks, **settings)  # type: ignore[arg-type]
    run.ready()
    return run


def kill(run: SimulatedRun, rank: int = 0) -> None:
    """A worker dies, the others leave, and the run goes on to what follows."""
    run.gone(rank, "killed")
    run.advance(GATHER_S)
    for other in set(range(run.num_ranks)) - {rank}:
        run.leave(other, e.Ended())


def finish(run: SimulatedRun) -> None:
    """All ranks return and what is to be written is written."""
    for rank in range(run.num_ranks):
        run.leave(rank)
    run.commit()
