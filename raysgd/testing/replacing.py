"""Attributes that are something else for a while."""

from __future__ import annotations

import contextlib
from typing import Any


def replace(undone: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, a class or an object, until ``undone`` is closed."""
    if name in vars(owner):
        undone.callback(setattr, owner, name, vars(owner)[name])
    else:
        undone.callback(delattr, owner, name)
    setattr(owner, name, value)
