"""The checks the config dataclasses share. Each raises `ConfigError` saying what was given, what is allowed, what to do."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from raysgd._util.wording import with_article
from raysgd.errors import ConfigError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_count(name: str, value: Any, *, minimum: int) -> int:
    """An int of at least ``minimum``; bools and floats are refused, since ``True`` and ``2.0`` are slips."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give an int >= {minimum}.")
    if value < minimum:
        raise ConfigError(f"{name}={value} is too small; give an int >= {minimum}.")
    return value


def check_amount(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number that is not negative (with ``positive``: above zero)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give a number.")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ConfigError(f"{name}={value!r} is out of range; give a finite number {'> 0' if positive else '>= 0'}.")
    return value


def check_choice(name: str, value: Any, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} is not known; give one of {', '.join(map(repr, allowed))}{_nearest(value, allowed)}."
        )
    return str(value)


def check_names(name: str, value: Any) -> list[str]:
    """A list of strings, not empty; one string is refused, whose letters would be taken for names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give a list of names.")
    if not value or not all(isinstance(each, str) and each for each in value):
        raise ConfigError(f"{name}={value!r} is no list of names; give one or more strings.")
    return list(value)


def check_component(name: str, value: Any) -> str:
    """A name that becomes one path component: no separators, no ``..``, nothing hidden."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{name}={value!r} cannot name a folder; give 1 to 128 letters, digits, '.', '_' or '-', not starting with '.'."
        )
    return value


def from_mapping(cls: type[T], mapping: Mapping[str, Any], what: str) -> T:
    """Make the config dataclass ``cls`` of a dict, refusing unknown keys with the nearest known one."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{what} has no field {key!r}{_nearest(key, known)}; its fields are {', '.join(known)}.")
    return cls(**mapping)


def _nearest(value: Any, allowed: Collection[str]) -> str:
    close = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
