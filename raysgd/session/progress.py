"""How far train_func has come, for those who watch over it. Worker side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pulse:
    """What a worker answers when asked how it is.

    Attributes:
        calls: Session calls of train_func in this attempt.
        idle_s: Seconds since the last one, or since train_func was entered.
        longest_pause_s: The longest time between two of them; 0 before the second.
        phase: The last one, such as ``"report"``.
        is_inside: Whether train_func is running.
    """

    calls: int = 0
    idle_s: float = 0.0
    longest_pause_s: float = 0.0
    phase: str = ""
    is_inside: bool = False


class Progress:
    """The session calls of one attempt. The training thread marks, others read: each reads or writes one attribute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls = 0
        self._marked_at = clock()
        self._longest_pause_s = 0.0
        self._phase = ""

    def enter(self) -> None:
        """train_func is being entered: what came before, such as forming the group, was none of its time."""
        self._marked_at = self._clock()

    def mark(self, phase: str) -> None:
        """train_func has made a call."""
        now = self._clock()
        pause_s = now - self._marked_at
        if self._calls and pause_s > self._longest_pause_s:
            self._longest_pause_s = pause_s
        self._marked_at = now
        self._phase = phase
        self._calls += 1

    def pulse(self, *, is_inside: bool) -> Pulse:
        """How it stands now."""
        idle_s = self._clock() - self._marked_at
        return Pulse(self._calls, idle_s, self._longest_pause_s, self._phase, is_inside)
