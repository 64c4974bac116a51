"""Keeps log records from tearing a live table: handlers that hold the terminal's streams write through its proxies."""

from __future__ import annotations

import logging
from typing import TextIO


class LogStreams:
    """Moves log handlers from some streams to others, and back.

    Rich's live display replaces ``sys.stdout`` and ``sys.stderr``; log handlers made before, Ray's among them, hold the
    streams themselves and would write into the middle of the table.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO, TextIO]] = []

    def move(self, old: TextIO, new: TextIO) -> None:
        if old is new:
            return
        for handler in _stream_handlers():
            if handler.stream is old:
                handler.setStream(new)
                self._moved.append((handler, old, new))

    def restore(self) -> None:
        moved, self._moved = self._moved, []
        for handler, old, new in moved:
            if handler.stream is new:  # else someone has set another since
                handler.setStream(old)


def _stream_handlers() -> list[logging.StreamHandler[TextIO]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
    return [handler for handler in dict.fromkeys(handlers) if isinstance(handler, logging.StreamHandler)]
