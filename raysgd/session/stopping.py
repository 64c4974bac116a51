"""A stop that all ranks see at the same place of their loop. Worker side.

Ranks that look at ``should_stop()`` in a loop with collectives must all get the same answer from their n-th look, or some
would leave while others wait for them. So a stop is agreed on: the controller first holds all ranks (`StopGate.hold`), which
tells it how far each has come, then lets them go on with a limit none of them has passed (`StopGate.release`). Being held
takes as long as one call of the controller to all ranks, milliseconds, and only ranks that look or report meanwhile notice.
"""

from __future__ import annotations

import threading


class StopGate:
    """Counts the looks of one rank. The training thread asks, other threads hold and release.

    Attributes:
        is_closed_for_reports: Read without the lock by every report: nothing to do while false.
        was_found: A look has found the stop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_looks = 0
        self._is_held = False
        self._is_open = False
        self._from_look: int | None = None
        self._last_report: int | None = None
        self.is_closed_for_reports = False
        self.was_found = False

    def hold(self, num_reports: int) -> tuple[int, int]:
        """Let the next look and the next report wait; returns how many this rank has made of each."""
        with self._changed:
            self._is_held = not self._is_open  # the attempt's end may have overtaken this call
            self.is_closed_for_reports = True
            return self._num_looks, num_reports

    def release(self, from_look: int, last_report: int | None) -> None:
        """Looks from number ``from_look`` on find the stop, or from an earlier one on that was agreed on before.

        Args:
            from_look: The same for all ranks.
            last_report: The last report that is taken; None: all are.
        """
        with self._changed:
            self._from_look = from_look if self._from_look is None else min(self._from_look, from_look)
            self._last_report = self._last_report if last_report is None else last_report
            self.is_closed_for_reports = self._last_report is not None
            self._let_go()

    def open(self) -> None:
        """The attempt ends otherwise: nobody waits here any longer."""
        with self._changed:
            self._is_open = True
            self._let_go()

    def look(self) -> bool:
        """Whether the stop is to be seen; waits while held."""
        with self._changed:
            look, self._num_looks = self._num_looks, self._num_looks + 1
            self._changed.wait_for(lambda: not self._is_held)
            is_found = self._from_look is not None and look >= self._from_look
            self.was_found = self.was_found or is_found
            return is_found

    def takes_report(self, number: int) -> bool:
        """Whether report ``number`` (from 0) is still taken; waits while held."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            return self._last_report is None or number <= self._last_report

    def _let_go(self) -> None:
        self._is_held = False
        self._changed.notify_all()
