"""How messages name datasets and columns, and what they say of a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from raysgd.errors import ConfigError


def column_of(dataset: str, column: str) -> str:
    return f"column {column!r} of dataset {dataset!r}"


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_columns(dataset: str, wanted: Iterable[str], known: list[str], argument: str = "columns") -> list[str]:
    """The wanted columns as a list.

    Raises:
        ConfigError: One of them is not there, or they were given as one string.
    """
    if isinstance(wanted, str):
        raise ConfigError(f"{argument}={wanted!r} is one string; give a list: {argument}=[{wanted!r}].")
    names = list(wanted)
    for name in names:
        if name not in known:
            there = ", ".join(map(repr, known)) or "none"
            raise ConfigError(f"dataset {dataset!r} has no column {name!r}{nearest(str(name), known)}; it has {there}.")
    return names
