"""Modules that are loaded already, for code that uses a framework but does not load one."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """The module ``name``, if it is loaded, and wholly: another thread may be in the middle of its import. Otherwise None."""
    module = sys.modules.get(name)
    is_being_imported = getattr(getattr(module, "__spec__", None), "_initializing", False)  # as importlib marks it
    return None if is_being_imported else module
