"""Notices that the TrainerActor's event loop stands still, and where: a thread of the TrainerActor.

Everything waits for the loop: reports, commits, heartbeats, readers. No call on it may block; one that does is named.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

#: Seconds for which a loop must stand still to count as blocked.
BLOCKED_S = 0.2
_TICK_S = 0.1
#: Lines of the stack that are kept, the innermost ones.
_NUM_FRAMES = 12


class LoopWatch:
    """Watches the running loop until `close`.

    Args:
        report: Called on the loop, once it runs again, with the seconds that it stood still and the stack at that time.
    """

    def __init__(self, report: Callable[[float, str], None]) -> None:
        self._report = report
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="raysgd-loop-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching; does not wait for the thread."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(_TICK_S):
            ran, asked_at = threading.Event(), time.monotonic()
            try:
                self._loop.call_soon_threadsafe(ran.set)
            except RuntimeError:  # the loop is closed
                return
            if ran.wait(BLOCKED_S):
                continue
            stack = self._read_stack()
            while not ran.wait(_TICK_S):
                if self._closing.is_set():
                    return
            seconds = time.monotonic() - asked_at
            self._loop.call_soon_threadsafe(self._report, round(seconds, 3), stack)

    def _read_stack(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        return "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]) if frame is not None else ""
