"""Gates at which all ranks stop at the same place of their loop. Worker side.

Ranks that check ``should_stop()`` in a loop with collectives must all get the same answer from their n-th check. Otherwise
some ranks would leave while others wait for them. So ranks agree on a stop in two steps: the controller holds all ranks,
which return how far each has come, and then releases them with a limit that no rank has passed. Ranks are held for as long as
one call of the controller to all ranks takes, which is milliseconds. Only ranks that check or report meanwhile wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from raysgd.session.events import AtSavePoint

_TICK_S = 1.0


class SaveGate:
    """The gate at one rank's ``save_checkpoint``. The training thread passes; other threads hold and release it.

    Attributes:
        limit: The save to leave after; None if there is none. Read without the lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_held = False
        self._is_open = False
        self._num_begun = 0
        self.limit: AtSavePoint | None = None

    def hold(self) -> int:
        """Make the next save wait; returns how many saves this rank has begun."""
        with self._changed:
            self._is_held = not self._is_open
            return self._num_begun

    def release(self, limit: AtSavePoint | None) -> None:
        """Allow saves up to this one, after which the rank waits. None: there is no such save any more."""
        with self._changed:
            self.limit = None if self._is_open else limit
            self._is_held = False
            self._changed.notify_all()

    def open(self) -> None:
        """Let every save pass, because the attempt ends."""
        with self._changed:
            self._is_open = True
            self._is_held = False
            self.limit = None
            self._changed.notify_all()

    def begin(self) -> None:
        """Begin a save; waits while the gate is held, and if this save comes after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held and not self._is_beyond())
            self._num_begun += 1

    def wait(self, on_tick: Callable[[], None]) -> None:
        """Wait after the last save until the attempt ends, or until ranks no longer leave after it, but after a later one.

        Args:
            on_tick: Called every second, so that waiting does not look like a hang.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: not self._is_beyond(), _TICK_S):
                on_tick()

    def _is_beyond(self) -> bool:
        return self.limit is not None and self._num_begun > self.limit.call


class StopGate:
    """The gate at one rank's ``should_stop()`` checks and reports. The training thread asks; other threads hold and release it.

    Attributes:
        is_closed_for_reports: Read without the lock by every report, which does nothing more while it is False.
        was_found: A check has found the stop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_checks = 0
        self._is_held = False
        self._is_open = False
        self._from_check: int | None = None
        self._last_report: int | None = None
        self._is_leaving = False
        self.is_closed_for_reports = False
        self.was_found = False

    def hold(self, num_reports: int) -> tuple[int, int]:
        """Make the next check and the next report wait; returns how many of each this rank has made."""
        with self._changed:
            self._is_held = not self._is_open  # the attempt may have ended before this call arrived
            self.is_closed_for_reports = True
            return self._num_checks, num_reports

    def release(self, from_check: int, last_report: int | None) -> None:
        """Make checks from number ``from_check`` on find the stop, or from an earlier number that was agreed on before.

        Args:
            from_check: The same for all ranks.
            last_report: The last report that is accepted; None: all are.
        """
        with self._changed:
            self._from_check = from_check if self._from_check is None else min(self._from_check, from_check)
            self._last_report = self._last_report if last_report is None else last_report
            self.is_closed_for_reports = self._last_report is not None
            self._release_waiting()

    def open(self) -> None:
        """Let everything pass, because the attempt ends for another reason."""
        with self._changed:
            self._is_open = True
            self._release_waiting()

    def check(self) -> bool:
        """Return whether this check finds the stop; waits while the gate is held."""
        with self._changed:
            number, self._num_checks = self._num_checks, self._num_checks + 1
            self._changed.wait_for(lambda: not self._is_held)
            is_found = self._from_check is not None and number >= self._from_check
            self._is_leaving = is_found and not self.was_found  # a loop that asks again stays
            self.was_found = self.was_found or is_found
            return is_found

    def takes_report(self, number: int) -> bool:
        """Return whether report ``number`` (from 0) is accepted; waits while the gate is held.

        A rank that has found the stop may report before it saves and returns.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            return self._is_leaving or self._last_report is None or number <= self._last_report

    def _release_waiting(self) -> None:
        self._is_held = False
        self._changed.notify_all()
