"""The logger ``raysgd``: every message of raysgd to a person goes there, except what display callbacks show.

Unless the application configures logging, records from INFO on are printed to standard error as ``[raysgd] text``. A handler
that the application attaches to the logger ``raysgd`` or to the root logger replaces that. In workers and helper processes
the same holds; Ray forwards what they print to the driver.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_NAME = "raysgd"


def get_logger() -> logging.Logger:
    """Return the logger ``raysgd``, with the default handler attached if it has no handler yet."""
    logger = logging.getLogger(_NAME)
    if logger.level == logging.NOTSET:  # whatever handler it has: a file of the application gets what would be printed
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_DefaultHandler())
    return logger


class _DefaultHandler(logging.Handler):
    """Prints to what ``sys.stderr`` is at the time, unless another handler gets the record."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[raysgd] %(message)s"))

    def filter(self, record: logging.LogRecord) -> Any:
        own = logging.getLogger(_NAME)
        is_handled = any(handler is not self for handler in own.handlers) or (own.propagate and logging.root.handlers)
        return not is_handled and super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
