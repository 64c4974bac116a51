"""Whether a process that does not answer still runs. Pure.

A process that does not answer may be in a C call that holds the interpreter's lock; such a process uses its CPU or waits for
one. A process that does neither is stopped or dead. Workers are asked by `raysgd.controller.run.worker_watch`, raysgd's own
processes by `raysgd.workers.liveness.own_processes`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

#: Fraction of a core above which a process that does not answer is busy. Ray's own threads use a fifth of that.
BUSY_SHARE = 0.05
#: Fraction of the time, used or waited for a CPU, above which a process is starved: it could run and gets no CPU. Ray's threads
#: that wake up now and then stay below it.
STARVED_SHARE = 0.5
#: Seconds over which both fractions are measured, at least.
MIN_WINDOW_S = 1.0


class CpuTimes(NamedTuple):
    """The CPU times of a process at one moment: seconds on a CPU, and seconds that it waited for one."""

    at: float
    used_s: float
    waited_s: float


@dataclass
class Silence:
    """The observations of one process since its last answer.

    Attributes:
        answered_at: When it last answered, in seconds of the clock that all calls use.
        cpu_times: Its CPU times since then, within the window of `window_s`.
        is_stopped: It was stopped (SIGSTOP) when it was last checked.
        is_reachable: Its process could be checked.
    """

    answered_at: float
    cpu_times: deque[CpuTimes] = field(default_factory=deque)
    is_stopped: bool = False
    is_reachable: bool = True

    def add_check(self, used_s: float, waited_s: float, is_stopped: bool, now: float, timeout_s: float) -> None:
        """The process was checked from outside: seconds on a CPU, and waiting for one.

        Time in which its node could not be reached does not count, and as much time again: TCP doubles its pauses during a cut,
        so an answer may come that late.
        """
        if not self.is_reachable:
            known_at = max([self.answered_at, *(times.at for times in self.cpu_times)])
            self.answered_at += 2 * max(0.0, now - known_at)
        self.cpu_times.append(CpuTimes(now, used_s, waited_s))
        while len(self.cpu_times) > 2 and now - self.cpu_times[1].at >= window_s(timeout_s):
            self.cpu_times.popleft()
        self.is_stopped, self.is_reachable = is_stopped, True

    def is_late(self, now: float, timeout_s: float) -> bool:
        """Return whether the answer is late enough to check the process."""
        return now - self.answered_at > timeout_s / 3

    def is_over_limit(self, now: float, timeout_s: float) -> bool:
        """Return whether the process has been silent for too long, and is not busy."""
        return now - self.answered_at > timeout_s and not (self.is_reachable and self.is_busy())

    def is_busy(self) -> bool:
        """Return whether the process used its CPU lately, or was starved."""
        if self.is_stopped or len(self.cpu_times) < 2:
            return False
        first, last = self.cpu_times[0], self.cpu_times[-1]
        span_s, used_s, waited_s = (end - begin for begin, end in zip(first, last, strict=True))
        return used_s > BUSY_SHARE * span_s or used_s + waited_s > STARVED_SHARE * span_s

    def skip(self, gap_s: float) -> None:
        """Leave out some seconds in which the observer itself did not run, so that it could not see an answer."""
        self.answered_at += gap_s
        self.cpu_times.clear()

    def describe(self, now: float) -> str:
        """Return for how long the process has been silent, and why if that is known."""
        silence = f"gave no sign of life for {now - self.answered_at:.1f} s"
        if not self.is_reachable:
            return f"{silence}, nor did its node: it is lost or cut off"
        return f"{silence}; {'it was stopped (SIGSTOP)' if self.is_stopped else 'it does not run'}"


def window_s(timeout_s: float) -> float:
    """Return the seconds over which CPU use is measured: an overloaded machine runs a busy process only now and then."""
    return max(MIN_WINDOW_S, timeout_s / 3)
