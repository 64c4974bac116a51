"""Keeps log records from tearing a live table: handlers that hold the terminal's streams write through its proxies."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO


class LogStreams:
    """Lets log handlers write to what ``sys.stdout`` and ``sys.stderr`` are at the time, not to what they were once.

    Rich's live display replaces both; log handlers made before, Ray's among them, hold the streams themselves and would
    write into the middle of the table. They are moved before it is there: a record may come at any moment.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[logging.StreamHandler[Any], TextIO, _Current]] = []

    def move(self) -> None:
        for name in ("stdout", "stderr"):
            old, new = getattr(sys, name), _Current(name)
            for handler in _stream_handlers():
                # One that asks `sys` each time, as Python's handler of last resort, needs no move.
                if handler.stream is old and not isinstance(getattr(type(handler), "stream", None), property):
                    handler.setStream(new)
                    self._moved.append((handler, old, new))

    def restore(self) -> None:
        moved, self._moved = self._moved, []
        for handler, old, new in moved:
            if handler.stream is new:  # else someone has set another since
                handler.setStream(old)


class _Current:
    """Writes to the stream that has the name in `sys` now."""

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
