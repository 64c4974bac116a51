"""How an elastic group takes newcomers in. Pure: part of the run's machine."""

from __future__ import annotations

from collections.abc import Callable

from raysgd.controller.commands import Command, Note, SetTimer
from raysgd.controller.savepoint import SavePoint
from raysgd.controller.scaling_policy import ScalingPolicy
from raysgd.controller.states import Running

_BOUND = (
    "the group does not grow: checkpoints saved with all_ranks=True can be gone on from by as many ranks as saved them "
    "only, unless they have arrays in shards and are alike in all else; save the whole state from rank 0 for elastic training"
)


class Growth:
    """Asks for a save point when the policy says so.

    Args:
        clock: Seconds since the epoch.
        out: Where commands go.
    """

    def __init__(self, savepoint: SavePoint, clock: Callable[[], float], out: Callable[[Command], None]) -> None:
        self._savepoint = savepoint
        self._clock = clock
        self._out = out
        self._policy = ScalingPolicy()
        self._size: int | None = None
        self._is_warned = False

    def formed(self, running: Running, num_newcomers: int) -> None:
        """A group has formed; ``num_newcomers`` have come up meanwhile and are not in it."""
        if self._size is not None and running.num_ranks > self._size:
            self._policy.grown(self._clock())
        else:
            self._policy.taken_in()
        self._size = running.num_ranks
        if num_newcomers:
            self.came(running)

    def came(self, running: Running | None) -> None:
        """A newcomer is up; ``running`` is the attempt that could be left for it, if there is one."""
        self._policy.came(self._clock())
        self._wait(running)

    def lost(self) -> None:
        """A worker has died."""
        self._policy.shrunk(self._clock())

    def time_up(self, running: Running | None, is_bound_to_size: bool) -> None:
        """It may be time to grow. ``is_bound_to_size``: the newest checkpoint is of no use to a larger group."""
        due = self._policy.grow_at()
        if running is None or due is None or self._savepoint.why is not None:
            return
        if is_bound_to_size:
            self.refuse()
        elif self._clock() < due:
            self._wait(running)
        else:
            self._savepoint.want_change(running.attempt, running.serial, "the group grows")

    def refuse(self) -> None:
        """The checkpoint to go on from does not fit a larger group."""
        if not self._is_warned:
            self._is_warned = True
            self._out(Note("warning", {"message": _BOUND}))

    def _wait(self, running: Running | None) -> None:
        due = self._policy.grow_at()
        if running is not None and due is not None:
            self._out(SetTimer("grow", running.serial, max(0.0, due - self._clock())))
