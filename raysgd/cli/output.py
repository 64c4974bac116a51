"""What the workers of a script print, on its way to the terminal. Driver side.

Ray forwards the lines of the workers' files with a delay, and drops those that are still on their way when the program ends.
So every rank marks the begin and the end of its output (`raysgd.cli.script.OutputMark`), and the command waits for the ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.cli.script import OutputMark

#: Seconds to wait for the end of the output of all ranks. A rank that was killed marks no end.
AFTER_SUCCESS_S = 5.0
AFTER_FAILURE_S = 1.5
#: How Ray calls what prints the lines of workers.
_RAYS_HANDLER = "ray_print_logs"


class OutputProgress:
    """The progress of the output of all ranks. Called from Ray's thread and from the main thread.

    Args:
        token: See `OutputMark`.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._changed = threading.Condition()
        self._attempt = 0
        self._world_size = 0
        self._ended: set[tuple[int, bool]] = set()

    def filter(self, lines: list[str], *, is_err: bool) -> list[str]:
        """Return the lines without the marks, which are recorded."""
        shown = []
        for line in lines:
            text, mark = OutputMark.parse(line, self._token)
            if mark is not None:
                self._record(mark, is_err)
            if mark is None or text:
                shown.append(text)
        return shown

    def wait(self, timeout_s: float) -> bool:
        """Wait until all ranks of the newest attempt have marked the end of both streams; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: 0 < 2 * self._world_size <= len(self._ended), timeout_s)

    def _record(self, mark: OutputMark, is_err: bool) -> None:
        with self._changed:
            if mark.attempt > self._attempt:
                self._attempt, self._world_size = mark.attempt, mark.world_size
                self._ended.clear()
            if mark.attempt == self._attempt and mark.is_end:
                self._ended.add((mark.rank, is_err))
                self._changed.notify_all()


class WorkerOutput:
    """Removes the marks from what Ray prints, and waits for the rest of it. Made when this process is connected to Ray."""

    def __init__(self, token: str) -> None:
        self._progress = OutputProgress(token)
        # No public API gives the lines to a program.
        from ray._private import worker
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        dispatcher: Any = global_worker_stdstream_dispatcher
        printing = [handle for name, handle in dispatcher.handlers if name == _RAYS_HANDLER]
        self._print: Callable[[Any], None] | None = printing[0] if printing else None
        self._worker: Any = worker
        if self._print is not None:
            dispatcher.remove_handler(_RAYS_HANDLER)
            dispatcher.add_handler(_RAYS_HANDLER, self._show)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the rest of the output, at most for this time; return whether all of it has come."""
        is_shown = self._print is not None and self._worker._worker_logs_enabled  # a debugger switches it off
        return not is_shown or self._progress.wait(timeout_s)

    def _show(self, data: Mapping[str, Any]) -> None:
        lines = self._progress.filter(list(data.get("lines", ())), is_err=bool(data.get("is_err")))
        if lines and self._print is not None:
            self._print({**data, "lines": lines})
