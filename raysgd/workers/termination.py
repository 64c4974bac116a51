"""SIGTERM in a worker's process: a notice while an attempt runs, and obeyed otherwise. Worker side.

Ray's own handler ends a process that is idle at once, and one whose methods run when they have returned. It runs in the
main thread, which looks for signals every few milliseconds while methods run in others; this one takes its place, and
passes on to it what it makes no use of. A process forked by the user has the same handler, and passes on everything.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

#: Seconds after a preempted attempt is over in which the controller ends the process; then it does so itself.
_REMIND_S = 5.0


class Termination:
    """The process's SIGTERM. To be made in its main thread.

    Args:
        on_notice: Called for each SIGTERM, in the main thread; whether it makes use of it.
    """

    def __init__(self, on_notice: Callable[[], bool]) -> None:
        self._on_notice = on_notice
        self._pid = os.getpid()
        self._before: Any = signal.signal(signal.SIGTERM, self._take)

    def remind(self) -> None:
        """The attempt that made use of a notice is over: let the signal come again, in case nobody ends the process."""
        reminder = threading.Timer(_REMIND_S, os.kill, (self._pid, signal.SIGTERM))
        reminder.daemon = True
        reminder.start()

    def end_now(self) -> None:
        """End the process, wherever it stands."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _take(self, signum: int, frame: Any) -> None:
        if os.getpid() == self._pid and self._on_notice():
            return
        if callable(self._before):
            self._before(signum, frame)
        else:
            self.end_now()
