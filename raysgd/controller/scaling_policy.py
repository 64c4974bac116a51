"""When an elastic group takes in the newcomers that are up. Pure: times in, a time out."""

from __future__ import annotations

#: Seconds in which newcomers that come one after another are taken in together.
SETTLE_S = 1.0
#: Seconds between two growths, at least. Each costs a re-entry from the newest checkpoint.
MIN_PAUSE_S = 10.0
MAX_PAUSE_S = 300.0
#: Workers lost this soon after a growth make the next growth wait twice as long: machines that come and go would otherwise
#: have the group do nothing but change its size. Once for a growth: a node takes all its workers with it.
FLAP_S = 60.0


class ScalingPolicy:
    """Tells when to grow. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._pause_s = MIN_PAUSE_S
        self._grown_at: float | None = None
        self._came_at: float | None = None
        self._has_lost = False

    def came(self, now: float) -> None:
        """A newcomer is up."""
        self._came_at = now

    def grown(self, now: float) -> None:
        """The group has taken in those who were up."""
        if self._grown_at is not None and now - self._grown_at > self._pause_s + FLAP_S:
            self._pause_s = MIN_PAUSE_S  # it went well for long enough
        self._grown_at, self._came_at, self._has_lost = now, None, False

    def taken_in(self) -> None:
        """Those who were up came in without a growth: they replaced others, or the group has just begun."""
        self._came_at = None

    def shrunk(self, now: float) -> None:
        """The group has lost a worker."""
        if self._grown_at is not None and now - self._grown_at <= FLAP_S and not self._has_lost:
            self._has_lost = True
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)

    def grow_at(self) -> float | None:
        """When the group may grow next; None while nobody waits to come in."""
        if self._came_at is None:
            return None
        settled = self._came_at + SETTLE_S
        return settled if self._grown_at is None else max(settled, self._grown_at + self._pause_s)
