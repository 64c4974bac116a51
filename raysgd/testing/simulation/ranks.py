"""Workers of a simulated run, and what the controller was told of them in one attempt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from raysgd.controller import commands as c
from raysgd.session import events as e
from raysgd.testing.simulation.said import part

#: In an outbox: the stream ends.
GONE = object()


@dataclass
class SimulatedRank:
    """A simulated worker in one attempt. What it says waits in ``outbox`` until it is delivered.

    Attributes:
        first_save_after: Reports before its first save.
        unscored: A save whose round is to come, in a loop that saves before it reports.
        unwritten: Saves whose bytes are not on storage yet.
        has_left: It has said its last word.
        is_stuck: It does not notice that its attempt is over.
        last_save: The save that all ranks leave after, if they are to.
        waits: It has made that save.
        is_asked: It finds ``should_stop()`` true.
        is_preempted: Its process was told to end.
    """

    number: int
    outbox: deque[Any] = field(default_factory=deque)
    num_reports: int = 0
    num_calls: int = 0
    saves_first: bool = False
    first_save_after: int | None = None
    unscored: int | None = None
    unwritten: list[int] = field(default_factory=list)
    has_left: bool = False
    is_told: bool = False
    is_stuck: bool = False
    last_save: int | None = None
    waits: bool = False
    died: str | None = None
    is_asked: bool = False
    is_preempted: bool = False

    def leave(self, last_word: e.WorkerEvent) -> None:
        """Say a last word, when what it saves is written."""
        self.outbox += [part(call) for call in self.unwritten]  # a worker ends only when its writes have
        self.unwritten.clear()
        self.outbox += [last_word, GONE]
        self.has_left = True

    def wait_if_due(self) -> None:
        """It has made the save that all leave after, and the report that belongs to it."""
        if self.last_save is None or self.num_calls <= self.last_save or self.unscored is not None:
            return
        if not self.waits:
            self.waits = True
            self.outbox.append(e.AtSavePoint(self.last_save))

    def die(self, why: str, *, loses: bool) -> None:
        """Its process ends.

        Args:
            why: What the controller is told.
            loses: With what it had said and not yet sent.
        """
        if loses:
            self.outbox.clear()
        self.died, self.has_left = why, True
        self.unwritten.clear()
        self.outbox = deque(item for item in self.outbox if item is not GONE)
        self.outbox.append(GONE)


@dataclass
class SimulatedAttempt:
    """What the controller has been told in one attempt."""

    entered: c.Enter
    ranks: list[SimulatedRank]
    returned: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    saved: dict[int, dict[int, e.Saved]] = field(default_factory=dict)
    safe: dict[int, set[int]] = field(default_factory=dict)
    raised: dict[int, e.Failed] = field(default_factory=dict)
    is_entered: bool = False
    preempted: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    saw_stop: bool = False

    def note(self, rank: int, event: e.WorkerEvent) -> None:
        """It is told something by a worker."""
        match event:
            case e.Entered():
                self.is_entered = True
            case e.Saved():
                self.saved.setdefault(event.call, {})[rank] = event
            case e.PartSafe():
                self.safe.setdefault(event.call, set()).add(rank)
            case e.Returned():
                self.returned.add(rank)
                self.saw_stop = self.saw_stop or event.saw_stop
            case e.Preempted():
                self.preempted.add(rank)
            case e.Failed():
                self.raised[rank] = event
