"""Workers of a `support.simulation.SimulatedRun`, whose events wait until a test delivers them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from raysgd.controller import commands as c
from raysgd.session import events as e
from support.simulation import part

#: In an event queue: the stream ends.
GONE = object()


@dataclass
class SimulatedRank:
    """A simulated worker in one attempt. Its events wait in ``event_queue`` until they are delivered.

    Attributes:
        first_save_after: Reports before its first save.
        unscored: A save that its round's report will follow, in a loop that saves before it reports.
        unwritten: Saves that are not on storage yet.
        has_left: It has sent its last event.
        was_ended: Its attempt was ended.
        is_stuck: It does not notice that its attempt was ended.
        last_save: The save after which all ranks leave, if there is a save point.
        point: The request for it.
        is_waiting: It waits after that save.
        sees_stop: It finds ``should_stop()`` true.
        is_preempted: Its process got SIGTERM.
    """

    number: int
    event_queue: deque[Any] = field(default_factory=deque)
    num_reports: int = 0
    num_calls: int = 0
    saves_first: bool = False
    first_save_after: int | None = None
    unscored: int | None = None
    unwritten: list[int] = field(default_factory=list)
    has_left: bool = False
    was_ended: bool = False
    is_stuck: bool = False
    last_save: int | None = None
    point: int = 0
    is_waiting: bool = False
    died: str | None = None
    sees_stop: bool = False
    is_preempted: bool = False

    def leave(self, last_event: e.WorkerEvent) -> None:
        """Send the last event, after everything that was saved is written."""
        self.event_queue += [part(call) for call in self.unwritten]  # a worker ends only when its writes have
        self.unwritten.clear()
        self.event_queue += [last_event, GONE]
        self.has_left = True

    def wait_if_due(self) -> None:
        """Wait if this rank has made the save that all ranks leave after, and the report that belongs to it."""
        if self.last_save is None or self.num_calls <= self.last_save or self.unscored is not None:
            return
        if not self.is_waiting:
            self.is_waiting = True
            self.event_queue.append(e.AtSavePoint(self.last_save, self.point))

    def die(self, why: str, *, loses_unsent: bool) -> None:
        """End the worker's process.

        Args:
            why: The reason that the controller gets.
            loses_unsent: The events that were not sent are lost too.
        """
        if loses_unsent:
            self.event_queue.clear()
        self.died, self.has_left = why, True
        self.unwritten.clear()
        self.event_queue = deque(item for item in self.event_queue if item is not GONE)
        self.event_queue.append(GONE)


@dataclass
class SimulatedAttempt:
    """What the controller knows of one attempt."""

    entered: c.StartAttempt
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

    def record(self, rank: int, event: e.WorkerEvent) -> None:
        """Record an event of a worker."""
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
