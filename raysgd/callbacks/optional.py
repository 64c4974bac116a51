"""Libraries that are only there if the user asked for them, found early and imported late."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def require(package: str, extra: str) -> None:
    """Check, without importing it, that a package is installed here.

    Raises:
        ImportError: It is not; the text names the extra that brings it.
    """
    if importlib.util.find_spec(package) is None:
        raise _missing(package, extra)


def import_optional(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Raises:
        ImportError: It is not installed; the text names the extra that brings it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and misses something of its own
            raise
        raise _missing(package, extra) from None


def _missing(package: str, extra: str) -> ImportError:
    return ImportError(f"{package} is not installed here; run: pip install 'raysgd[{extra}]'", name=package)
