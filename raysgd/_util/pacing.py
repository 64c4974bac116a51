"""How often a stream may flush: at once after a pause, less often under load."""

from __future__ import annotations


class Pacer:
    """A token bucket: ``burst`` flushes at once, and one more every ``interval_s``.

    The burst is what lets the batches of all ranks of one round through together after a pause.
    """

    def __init__(self, interval_s: float, burst: int) -> None:
        self._interval_s = interval_s
        self._burst = burst
        self._tokens = float(burst)
        self._at = float("-inf")

    def wait_s(self, now: float) -> float:
        """Seconds until the next flush may be; at most 0 if it may be now."""
        return (1 - self._filled(now)) * self._interval_s

    def spend(self, now: float) -> None:
        """A flush happens."""
        self._tokens = max(0.0, self._filled(now) - 1)
        self._at = now

    def _filled(self, now: float) -> float:
        if self._interval_s <= 0:
            return float(self._burst)
        return min(float(self._burst), self._tokens + (now - self._at) / self._interval_s)
