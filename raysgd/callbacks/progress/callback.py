"""The progress display, which a run has by default. Runs in the driver."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TextIO, get_args

from raysgd.callbacks.base import Callback
from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.result import Event, Result, RunInfo

if TYPE_CHECKING:
    from raysgd.callbacks.progress.lines import LinesDisplay
    from raysgd.callbacks.progress.live import TableDisplay

Mode = Literal["auto", "live", "lines", "off"]

#: A program leaves a display in another thread than that which reads the run. Not of the callback, which is pickled.
_lock = threading.Lock()


class ProgressCallback(Callback):
    """Shows a run while it goes: its state, latest metrics and their history, each worker's load, checkpoints, warnings.

    Times count from the run's start; the time of training alone is marked as such. The time that is left is shown if
    ``num_iterations`` is given: only train_func knows how often it reports.

    ``mode="auto"`` chooses when the run starts: a live table on a terminal and in a notebook, otherwise plain lines, one per
    result and at most one a second. ``"live"`` always shows the table, ``"lines"`` always lines (which suits a debugger in the
    driver), ``"off"`` nothing. A run without a ProgressCallback gets ``ProgressCallback()``.

    Args:
        mode: ``"auto"``, ``"live"``, ``"lines"`` or ``"off"``.
        refresh_hz: How often the table is drawn, per second.
        file: Where to write. None: ``sys.stdout``.
        num_iterations: The number of results that the run will have, including those before a checkpoint it resumes from.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        refresh_hz: float = 4,
        file: TextIO | None = None,
        *,
        num_iterations: int | None = None,
    ) -> None:
        self._mode = check_choice("ProgressCallback(mode)", mode, get_args(Mode))
        self._refresh_hz = check_amount("ProgressCallback(refresh_hz)", refresh_hz, positive=True)
        self._file = file
        if num_iterations is not None:
            check_count("ProgressCallback(num_iterations)", num_iterations, minimum=1)
        self._num_iterations = num_iterations
        self._display: LinesDisplay | TableDisplay | None = None

    def on_run_start(self, info: RunInfo) -> None:
        self._display = make_display(self._mode, self._refresh_hz, self._file, info, self._num_iterations)
        if self._display is not None:
            self._display.start()

    def on_result(self, result: Result) -> None:
        with _lock:
            if self._display is not None:
                self._display.result(result)

    def on_event(self, event: Event) -> None:
        with _lock:
            if self._display is not None:
                self._display.event(event)

    def on_run_end(self, error: BaseException | None) -> None:
        with _lock:
            display, self._display = self._display, None
        if display is not None:
            display.end(error)

    def leave(self) -> None:
        """Show nothing more of the run, which continues."""
        with _lock:
            display, self._display = self._display, None
        if display is not None:
            display.leave()


def make_display(
    mode: str, refresh_hz: float, file: TextIO | None, info: RunInfo, num_iterations: int | None = None
) -> LinesDisplay | TableDisplay | None:
    """Make the display of a run for a mode; None for ``"off"``."""
    if mode == "off":
        return None
    is_notebook = file is None and in_notebook()
    if mode == "lines" or (mode == "auto" and not is_notebook and not is_terminal(file)):
        from raysgd.callbacks.progress.lines import LinesDisplay

        return LinesDisplay(info, file, num_iterations)
    from raysgd.callbacks.progress.live import NotebookScreen, TableDisplay, TerminalScreen

    screen = NotebookScreen(refresh_hz) if is_notebook else TerminalScreen(refresh_hz, file)
    return TableDisplay(info, screen, num_iterations)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook (not IPython in a terminal)."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # a kernel has imported it
    shell = get_ipython() if get_ipython is not None else None
    return shell is not None and shell.has_trait("kernel") and shell.kernel is not None


def is_terminal(file: TextIO | None) -> bool:
    """Return whether the file (None: ``sys.stdout``) is a terminal that can move its cursor."""
    stream = sys.stdout if file is None else file
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def default_callbacks(callbacks: Sequence[Callback], mode: Mode = "auto") -> list[Callback]:
    """Return the callbacks with the progress display last, so that its last line knows the warnings of the others.

    If there is none (``mode="off"`` counts), a `ProgressCallback` with this mode is added.
    """
    displays = [callback for callback in callbacks if isinstance(callback, ProgressCallback)]
    others = [callback for callback in callbacks if not isinstance(callback, ProgressCallback)]
    return [*others, *(displays or [ProgressCallback(mode)])]
