"""Simulated workers of a run that is stepped by hand, and what the controller was told of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from raysgd.controller import commands as c
from raysgd.session import events as e
from support.stepping import part

#: In an outbox: the stream ends.
GONE = object()


@dataclass
class Rank:
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
        self.outbox += [part(call) for call in self.unwritten]  # a worker ends only when its writes have
        self.unwritten.clear()
        self.outbox += [last_word, GONE]
        self.has_left = True

    def wait_if_due(self) -> None:
        """It has made the save that all leave after, and the report that belongs to it."""
        is_due = self.last_save is not None and self.num_calls > self.last_save and self.unscored is None
        if is_due and not self.waits:
            self.waits = True
            self.outbox.append(e.AtSavePoint(self.last_save))

    def die(self, why: str, *, loses: bool) -> None:
        if loses:
            self.outbox.clear()
        self.died, self.has_left = why, True
        self.unwritten.clear()
        self.outbox = deque(item for item in self.outbox if item is not GONE)
        self.outbox.append(GONE)


@dataclass
class Attempt:
    """What the controller has been told in one attempt."""

    entered: c.Enter
    ranks: list[Rank]
    returned: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    saved: dict[int, dict[int, e.Saved]] = field(default_factory=dict)
    safe: dict[int, set[int]] = field(default_factory=dict)
    raised: dict[int, e.Failed] = field(default_factory=dict)
    is_entered: bool = False
    preempted: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    saw_stop: bool = False
