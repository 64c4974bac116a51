"""Show a run's progress as a table that is redrawn in a terminal or in a notebook. Runs in the driver.

The thread that reads the stream only stores results and events. Another thread draws at a fixed rate, so ten thousand
results a second cost as much drawing as one. Files and pipes get `raysgd.callbacks.progress.lines`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from raysgd._util.tables import as_html, as_text
from raysgd.callbacks.progress.state import ProgressState
from raysgd.result import Event, Result, RunInfo

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_NOTEBOOK_WIDTH = 110


class LogStreams:
    """Makes log handlers write to the current ``sys.stdout`` and ``sys.stderr``.

    Rich's live display replaces both streams. Handlers made before, such as Ray's, hold the old streams and would write into
    the middle of the table. They are moved before the table is shown, since a record may come at any time.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[logging.StreamHandler[Any], TextIO, _Current]] = []

    def move(self) -> None:
        for name in ("stdout", "stderr"):
            old, new = getattr(sys, name), _Current(name)
            for handler in _stream_handlers():
                # A handler with a property, such as Python's handler of last resort, looks up the stream each time.
                if handler.stream is old and not isinstance(getattr(type(handler), "stream", None), property):
                    handler.setStream(new)
                    self._moved.append((handler, old, new))

    def restore(self) -> None:
        moved, self._moved = self._moved, []
        for handler, old, new in moved:
            if handler.stream is new:  # else its stream was changed meanwhile
                handler.setStream(old)


class _Current:
    """Writes to ``sys.stdout`` or ``sys.stderr``, whichever stream that is at the time."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        return int(getattr(sys, self._name).write(text))

    def flush(self) -> None:
        getattr(sys, self._name).flush()


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
    return [handler for handler in dict.fromkeys(handlers) if isinstance(handler, logging.StreamHandler)]


class TableDisplay:
    """Keeps the state of a run, which a screen draws.

    Args:
        info: The run.
        screen: Where the table is drawn.
        num_iterations: The number of results that the run will have, if that is known.
    """

    def __init__(
        self, info: RunInfo, screen: TerminalScreen | NotebookScreen, num_iterations: int | None = None
    ) -> None:
        self._state = ProgressState(info, num_iterations)
        self.screen = screen

    def start(self) -> None:
        self.screen.open(self._draw)

    def result(self, result: Result) -> None:
        self._state.result(result)

    def event(self, event: Event) -> None:
        self._state.event(event)

    def end(self, error: BaseException | None) -> None:
        self._state.end(error)
        self.screen.close()

    def leave(self) -> None:
        """Draw the table for the last time; the run continues."""
        self.screen.close()

    def _draw(self) -> RenderableType:
        """Draw the current state. An error is shown in place of the table; it must not end the drawing thread."""
        from raysgd.callbacks.progress.view import ProgressView

        try:
            return ProgressView(self._state.snapshot())
        except Exception as error:
            return f"the progress display failed: {error!r}"


class TerminalScreen:
    """Redraws the table in a terminal. Output of the driver scrolls by above it.

    Args:
        refresh_hz: How often the table is drawn, per second.
        file: The terminal. None: rich's own console, on ``sys.stdout``.
    """

    def __init__(self, refresh_hz: float, file: TextIO | None = None) -> None:
        self._refresh_hz = refresh_hz
        self._file = file
        self._live: Live | None = None
        self._logs = LogStreams()

    def open(self, draw: Callable[[], RenderableType]) -> None:
        from rich.live import Live

        console = _console(self._file)
        self._live = Live(
            get_renderable=draw,
            console=console,
            refresh_per_second=self._refresh_hz,
            redirect_stdout=self._file is None,
            redirect_stderr=self._file is None and sys.stderr.isatty(),  # do not redirect a stderr that goes to a file
        )
        # The thread that ends a run is a daemon; if the interpreter exits first, the last table is drawn here.
        atexit.register(self.close)
        self._logs.move()
        self._live.start()
        # Keep the cursor visible, so that a driver that is killed leaves a usable terminal.
        console.show_cursor(True)
        self._live.refresh()

    def close(self) -> None:
        """Draw the table for the last time and restore the streams. May be called again."""
        live, self._live = self._live, None
        atexit.unregister(self.close)
        if live is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # the stream may be closed
                    stream.flush()  # a proxy holds back an incomplete last line
            live.stop()  # draws once more, and removes its proxies from sys.stdout and sys.stderr
        self._logs.restore()  # not before: output past the proxies would be overdrawn


class NotebookScreen:
    """Replaces the table in the output of a notebook's cell.

    Args:
        refresh_hz: How often the table is drawn, per second.
    """

    def __init__(self, refresh_hz: float) -> None:
        self._interval_s = 1 / refresh_hz
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, draw: Callable[[], RenderableType]) -> None:
        from IPython.display import display

        handle: Any = display(mime_bundle(draw()), raw=True, display_id=True)  # type: ignore[no-untyped-call]

        def refresh() -> None:
            is_last = False
            while not is_last:
                is_last = self._done.wait(self._interval_s)
                handle.update(mime_bundle(draw()), raw=True)

        self._thread = threading.Thread(target=refresh, name="raysgd-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Draw the table for the last time."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()


def mime_bundle(renderable: RenderableType) -> dict[str, str]:
    """Render as HTML and as text, for a notebook."""
    draw = {"text/html": as_html, "text/plain": as_text}
    return {kind: write(renderable, width=_NOTEBOOK_WIDTH) for kind, write in draw.items()}


def _console(file: TextIO | None) -> Console:
    from rich import get_console
    from rich.console import Console

    if file is not None:
        return Console(file=file, force_terminal=True)
    # The console of rich.print, whose output then goes above the table too.
    console = get_console()
    return console if console.is_terminal else Console(force_terminal=True)
