"""A save that all ranks leave their attempt after, so that the group can change. Worker side.

The n-th saves of all ranks form one checkpoint, so ranks that leave out of the same save have all done the same work, and
the next attempt repeats nothing. As with a stop (`raysgd.session.stopping`) the controller first holds all ranks
(`SaveGate.hold`), which tells it how many saves each has begun, and then lets them go on up to a save that none has begun
(`SaveGate.release`). After that save a rank waits, until the checkpoint is committed and the attempt is ended, or the
whole is called off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_TICK_S = 1.0


class SaveGate:
    """Where one rank's saves pass. The training thread passes, other threads hold and release.

    Attributes:
        last_save: Number of the save to leave after, from 0; None: there is none. Read without the lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_held = False
        self._is_open = False
        self._num_begun = 0
        self.last_save: int | None = None

    def hold(self) -> int:
        """Let the next save wait; returns how many this rank has begun."""
        with self._changed:
            self._is_held = not self._is_open
            return self._num_begun

    def release(self, last_save: int | None) -> None:
        """Saves up to number ``last_save`` are made, and the rank waits after it. None: there is no such save any more."""
        with self._changed:
            self.last_save = None if self._is_open else last_save
            self._is_held = False
            self._changed.notify_all()

    def open(self) -> None:
        """The attempt ends: nobody waits here any longer."""
        with self._changed:
            self._is_open = True
            self._is_held = False
            self.last_save = None
            self._changed.notify_all()

    def begin(self) -> None:
        """A save begins; waits while held, and where it is beyond the last one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held and not self._is_beyond())
            self._num_begun += 1

    def wait(self, on_tick: Callable[[], None]) -> None:
        """Wait after the last save for the end of the attempt, or for it to be called off.

        Args:
            on_tick: Called now and then: waiting is no hang.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: self.last_save is None, _TICK_S):
                on_tick()

    def _is_beyond(self) -> bool:
        return self.last_save is not None and self._num_begun > self.last_save
