"""Limit how often a stream flushes: at once after a pause, less often under load."""

from __future__ import annotations


class Pacer:
    """A token bucket: ``burst`` flushes at once, and one more every ``interval_s``.

    The burst lets the batches of all ranks of a round pass together after a pause.
    """

    def __init__(self, interval_s: float, burst: int) -> None:
        self._interval_s = interval_s
        self._burst = burst
        self._tokens = float(burst)
        self._at = float("-inf")

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next flush is allowed; 0 or less if it is allowed now."""
        return (1 - self._filled(now)) * self._interval_s

    def spend(self, now: float) -> None:
        """Count a flush."""
        self._tokens = max(0.0, self._filled(now) - 1)
        self._at = now

    def _filled(self, now: float) -> float:
        if self._interval_s <= 0:
            return float(self._burst)
        return min(float(self._burst), self._tokens + (now - self._at) / self._interval_s)
