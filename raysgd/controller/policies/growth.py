"""When an elastic group grows. Pure.

`raysgd.controller.state_machine.regrouping.Growth` asks the policy, and has the ranks leave for the larger group.
"""

from __future__ import annotations

#: Seconds in which joining workers that become ready one after another are taken in together.
SETTLE_S = 1.0
#: Seconds between two growths, at least. Each growth costs a new attempt from the newest checkpoint.
MIN_PAUSE_S = 10.0
MAX_PAUSE_S = 300.0
#: A worker lost this soon after a growth doubles the time until the next growth. Otherwise machines that come and go would
#: make the group resize all the time. It counts once for each growth, because a node takes all its workers with it.
FLAP_S = 60.0


class ScalingPolicy:
    """Decides when an elastic group grows. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._pause_s = MIN_PAUSE_S
        self._grown_at: float | None = None
        self._ready_at: float | None = None
        self._has_lost = False

    def on_worker_ready(self, now: float) -> None:
        """A joining worker is ready."""
        self._ready_at = now

    def on_grown(self, now: float) -> None:
        """The group has taken in the joining workers."""
        if self._grown_at is not None and now - self._grown_at > self._pause_s + FLAP_S:
            self._pause_s = MIN_PAUSE_S  # the last growth lasted
        self._grown_at, self._ready_at, self._has_lost = now, None, False

    def on_taken_in(self) -> None:
        """The joining workers came in without a growth: they replaced others, or the run has just begun."""
        self._ready_at = None

    def on_worker_lost(self, now: float) -> None:
        """The group has lost a worker."""
        if self._grown_at is not None and now - self._grown_at <= FLAP_S and not self._has_lost:
            self._has_lost = True
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)

    def grow_at(self) -> float | None:
        """Return when the group may grow next; None while no worker waits to join."""
        if self._ready_at is None:
            return None
        settled = self._ready_at + SETTLE_S
        return settled if self._grown_at is None else max(settled, self._grown_at + self._pause_s)
