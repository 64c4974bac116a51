"""The display of a run's progress, which is on unless it is asked not to be. Runs in the driver."""

from __future__ import annotations

import os
import sys
from typing import Protocol, TextIO

from raysgd.callbacks.base import Callback
from raysgd.config.checks import check_amount, check_choice
from raysgd.result import Event, Result, RunInfo

MODES = ("auto", "live", "lines", "off")


class Display(Protocol):
    """Shows one run, from ``start`` to ``end``."""

    def start(self, info: RunInfo) -> None: ...

    def result(self, result: Result) -> None: ...

    def event(self, event: Event) -> None: ...

    def end(self, error: BaseException | None) -> None: ...


class ProgressCallback(Callback):
    """Shows a run while it goes: its state, latest metrics and their history, each worker's load, checkpoints, warnings.

    ``mode="auto"`` chooses when the run starts: a live table on a terminal and in a notebook, else plain lines, one per
    result and no more than one a second. ``"live"`` insists on the table, ``"lines"`` on lines (also the choice for
    stepping through the driver with a debugger), ``"off"`` shows nothing. A raysgd run has this callback unless it is
    given one.

    Args:
        mode: ``"auto"``, ``"live"``, ``"lines"`` or ``"off"``.
        refresh_hz: Drawings of the table per second.
        file: Where to; None: ``sys.stdout``.
    """

    def __init__(self, mode: str = "auto", refresh_hz: float = 4, file: TextIO | None = None) -> None:
        self._mode = check_choice("ProgressCallback(mode)", mode, MODES)
        self._refresh_hz = check_amount("ProgressCallback(refresh_hz)", refresh_hz, positive=True)
        self._file = file
        self._display: Display | None = None

    def on_run_start(self, info: RunInfo) -> None:
        self._display = make_display(self._mode, self._refresh_hz, self._file)
        if self._display is not None:
            self._display.start(info)

    def on_result(self, result: Result) -> None:
        if self._display is not None:
            self._display.result(result)

    def on_event(self, event: Event) -> None:
        if self._display is not None:
            self._display.event(event)

    def on_run_end(self, error: BaseException | None) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.end(error)


def make_display(mode: str, refresh_hz: float, file: TextIO | None) -> Display | None:
    """The display for a mode here and now; None for ``"off"``."""
    if mode == "off":
        return None
    notebook = file is None and in_notebook()
    if mode == "lines" or (mode == "auto" and not notebook and not is_terminal(file)):
        from raysgd.callbacks.lines_display import LinesDisplay

        return LinesDisplay(file)
    from raysgd.callbacks.live_display import NotebookDisplay, TerminalDisplay

    return NotebookDisplay(refresh_hz) if notebook else TerminalDisplay(refresh_hz, file)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook (not IPython in a terminal)."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # never imported by a kernel-less process
    shell = get_ipython() if get_ipython is not None else None
    return shell is not None and shell.has_trait("kernel") and shell.kernel is not None


def is_terminal(file: TextIO | None) -> bool:
    """Whether the file (None: ``sys.stdout``) is a terminal that can move its cursor."""
    stream = sys.stdout if file is None else file
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
