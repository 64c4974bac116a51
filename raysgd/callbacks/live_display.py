"""A run's progress as a table that is drawn again and again, in a terminal or in a notebook.

Runs in the driver. Results and events are only stored by the thread that reads the stream; another thread draws, at a
fixed rate, so ten thousand results a second cost no more drawing than one. Terminals other than a real one get
`raysgd.callbacks.lines_display`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from raysgd.callbacks.log_streams import LogStreams
from raysgd.callbacks.progress_state import ProgressState
from raysgd.result import Event, Result, RunInfo

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_NOTEBOOK_WIDTH = 110
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


class TerminalDisplay:
    """A rich live table. What the driver prints or logs meanwhile scrolls by above it.

    Args:
        refresh_hz: Drawings per second.
        file: The terminal; None: rich's own console, on ``sys.stdout``.
    """

    def __init__(self, refresh_hz: float, file: TextIO | None = None) -> None:
        self._refresh_hz = refresh_hz
        self._file = file
        self._state: ProgressState | None = None
        self._live: Live | None = None
        self._logs = LogStreams()

    def start(self, info: RunInfo) -> None:
        from rich.live import Live

        self._state = ProgressState(info)
        console = _console(self._file)
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=self._refresh_hz,
            redirect_stdout=self._file is None,
            redirect_stderr=self._file is None and sys.stderr.isatty(),  # a log file that stderr was sent to stays one
        )
        # The thread that ends a run is a daemon: when the interpreter leaves first, the last table is drawn here.
        atexit.register(self._stop)
        self._logs.move()
        self._live.start()
        # The cursor stays visible, below the table: a driver that is killed leaves a terminal that needs no repair.
        console.show_cursor(True)
        self._live.refresh()

    def result(self, result: Result) -> None:
        if self._state is not None:
            self._state.result(result)

    def event(self, event: Event) -> None:
        if self._state is not None:
            self._state.event(event)

    def end(self, error: BaseException | None) -> None:
        if self._state is not None:
            self._state.end(error)
        self._stop()

    def _draw(self) -> RenderableType:
        return draw(self._state)

    def _stop(self) -> None:
        live, self._live = self._live, None
        atexit.unregister(self._stop)
        if live is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # a closed stream has nothing to show
                    stream.flush()  # a proxy holds back the last line until it is complete
            live.stop()  # draws once more, and takes its proxies off sys.stdout and sys.stderr
        self._logs.restore()  # not before: what went past the proxies would be drawn over


class NotebookDisplay:
    """A table in the output of a notebook's cell, replaced in place.

    Args:
        refresh_hz: Drawings per second.
    """

    def __init__(self, refresh_hz: float) -> None:
        self._interval_s = 1 / refresh_hz
        self._state: ProgressState | None = None
        self._handle: Any = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, info: RunInfo) -> None:
        from IPython.display import display

        self._state = ProgressState(info)
        self._handle = display(self._bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._refresh, name="raysgd-progress", daemon=True)
        self._thread.start()

    def result(self, result: Result) -> None:
        if self._state is not None:
            self._state.result(result)

    def event(self, event: Event) -> None:
        if self._state is not None:
            self._state.event(event)

    def end(self, error: BaseException | None) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._state is not None:
            self._state.end(error)
            self._handle.update(self._bundle(), raw=True)

    def _refresh(self) -> None:
        while not self._done.wait(self._interval_s):
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        return mime_bundle(draw(self._state))


def draw(state: ProgressState | None) -> RenderableType:
    """The state as it is now. A mistake in drawing is shown in place of the table; it must not end the drawing thread."""
    from raysgd.callbacks.progress_view import ProgressView

    if state is None:
        return ""
    try:
        return ProgressView(state.snapshot())
    except Exception as error:
        return f"the progress display failed: {error!r}"


def mime_bundle(renderable: RenderableType) -> dict[str, str]:
    """The renderable as HTML and as text, as notebooks take it."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=_NOTEBOOK_WIDTH, height=100, force_jupyter=False)
    console.print(renderable)
    html = console.export_html(inline_styles=True, code_format=_HTML, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}


def _console(file: TextIO | None) -> Console:
    from rich import get_console
    from rich.console import Console

    if file is not None:
        return Console(file=file, force_terminal=True)
    # The console of rich.print, so that what it prints goes above the table too.
    console = get_console()
    return console if console.is_terminal else Console(force_terminal=True)
