"""Import libraries: large ones faster, optional ones with an error that names the extra, loaded ones without loading."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector during an import.

    An import makes up to half a million objects that all stay, and the collector walks them again and again: a fifth of the
    time that torch or Ray Tune takes to be imported.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def imported(name: str) -> Any:
    """Return a loaded module, or None if it is not loaded or another thread is still importing it."""
    module = sys.modules.get(name)
    is_being_imported = getattr(getattr(module, "__spec__", None), "_initializing", False)  # set by importlib
    return None if is_being_imported else module


def import_optional(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Raises:
        ImportError: It is not installed; the message names the extra of raysgd that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is installed, but one of its own dependencies is not
            raise
        raise _missing(package, extra) from None


def _missing(package: str, extra: str) -> ImportError:
    return ImportError(f"{package} is not installed here; run: pip install 'raysgd[{extra}]'", name=package)
