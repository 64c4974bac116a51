"""How far train_func has come, and where its time went, for the liveness checks of the controller. Worker side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import NamedTuple

Clock = Callable[[], float]


class Spent(NamedTuple):
    """Where the time of train_func went, from its beginning to its last step.

    A step begins with a report or with a batch, whichever the loop makes more often. Time outside all parts is computation, and
    waiting that was not measured.

    Attributes:
        steps: How many steps have begun.
        total_s: Seconds since train_func was entered.
        data_s: Seconds of these in reading batches.
        checkpoint_s: Seconds in ``save_checkpoint``.
        waiting_s: Seconds in waiting for other ranks.
    """

    steps: int = 0
    total_s: float = 0.0
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True)
class Heartbeat:
    """A worker's answer to a heartbeat call.

    Attributes:
        calls: Session calls of train_func in this attempt.
        idle_s: Seconds since the last one, or since train_func was entered.
        longest_pause_s: The longest time between two of them; 0 before the second.
        phase: The last one, such as ``"report"``.
        is_inside: Whether train_func is running.
        spent: Where its time went.
        has_gpu: Whether it has a GPU, which may work while the timed thread waits.
    """

    calls: int = 0
    idle_s: float = 0.0
    longest_pause_s: float = 0.0
    phase: str = ""
    is_inside: bool = False
    spent: Spent = field(default_factory=Spent)
    has_gpu: bool = False


class Stopwatch:
    """Adds up the time that one thread spends in its ``with`` blocks. Other threads may enter it too; they are not counted.

    Attributes:
        seconds: Added up so far.
        thread: Identifier of the timed thread: the one that made the stopwatch, until `Progress.enter` changes it.
    """

    __slots__ = ("_began", "_clock", "_depth", "seconds", "thread")

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self.thread = get_ident()
        self._clock = clock
        self._depth = 0
        self._began = 0.0

    @property
    def is_running(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        if get_ident() == self.thread:
            if not self._depth:
                self._began = self._clock()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == self.thread:
            self._depth -= 1
            if not self._depth:
                self.seconds += self._clock() - self._began

    def add(self, seconds: float) -> None:
        """Count time that was spent elsewhere, while this stopwatch did not run."""
        self.seconds += seconds


class Progress:
    """The session calls of one attempt. The training thread notes them, and other threads read them, without a lock.

    A thread that writes checkpoints notes its progress too, by `wrote`.

    Attributes:
        data: Runs while a batch is read.
        checkpoint: Runs in ``save_checkpoint``, which waits for storage that is slower than saves are made.
        waiting: Runs while the rank is known to wait for others.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.data, self.checkpoint, self.waiting = Stopwatch(clock), Stopwatch(clock), Stopwatch(clock)
        self._clock = clock
        self._calls = 0
        self._entered_at = self._marked_at = self._wrote_at = clock()
        self._longest_pause_s = 0.0
        self._phase = ""
        self._num_reports = 0
        self._num_batches = 0
        self._steps = 0
        self._spent: tuple[int, float, float, float, float] = Spent()
        self._asked = (self._entered_at, 0.0)

    def enter(self) -> None:
        """Start the times, because this thread enters train_func now: forming the group is not part of its time."""
        self._entered_at = self._marked_at = self._clock()
        self._asked = (self._entered_at, 0.0)
        self.data.thread = self.checkpoint.thread = self.waiting.thread = get_ident()

    def mark(self, phase: str) -> None:
        """Note a session call of train_func."""
        now = self._clock()
        pause_s = now - self._marked_at
        if self._calls and pause_s > self._longest_pause_s:
            self._longest_pause_s = pause_s
        self._marked_at = now
        self._phase = phase
        self._calls += 1
        if phase == "report":
            self._num_reports = count = self._num_reports + 1
        elif phase == "batch":
            self._num_batches = count = self._num_batches + 1
        else:
            return
        if count > self._steps:  # reports or batches, whichever the loop makes more often
            self._steps = count
            total_s = now - self._entered_at
            # One assignment: a thread that reads meanwhile does not mix two steps. A plain tuple is made fastest.
            self._spent = (count, total_s, self.data.seconds, self.checkpoint.seconds, self.waiting.seconds)

    def data_wait_fraction(self) -> float | None:
        """Return the fraction of time spent waiting for batches since the last call, or since train_func was entered.

        None before the first batch.
        """
        waited_s = self.data.seconds
        if not waited_s:
            return None
        now = self._clock()
        asked_at, waited_before_s = self._asked
        self._asked = now, waited_s
        return round((waited_s - waited_before_s) / max(now - asked_at, 1e-9), 4)

    def wrote(self) -> None:
        """Note that storage has accepted a part of a checkpoint, or is tried again; called from any thread."""
        self._wrote_at = self._clock()

    def heartbeat(self, *, is_inside: bool, has_gpu: bool = False) -> Heartbeat:
        """Return the progress as it is now."""
        # While train_func waits for storage, progress of storage counts.
        since = max(self._marked_at, self._wrote_at) if self.checkpoint.is_running else self._marked_at
        idle_s = self._clock() - since
        spent = Spent(*self._spent)
        return Heartbeat(self._calls, idle_s, self._longest_pause_s, self._phase, is_inside, spent, has_gpu)
