"""Checks of single settings. Each raises `ConfigError`, which says what was given, what is allowed and what to do."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from raysgd._util.text import with_article
from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError, UnknownArgumentError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_count(name: str, value: Any, *, minimum: int) -> int:
    """Check that a value is an int of at least ``minimum``. ``True`` and ``2.0`` are refused: they are mistakes."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give an int >= {minimum}.")
    if value < minimum:
        raise ConfigError(f"{name}={value} is too small; give an int >= {minimum}.")
    return value


def check_amount(name: str, value: Any, *, positive: bool = False) -> float:
    """Check that a value is a finite number that is not negative (with ``positive``: above zero)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give a number.")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ConfigError(f"{name}={value!r} is out of range; give a finite number {'> 0' if positive else '>= 0'}.")
    return value


def check_bool(name: str, value: Any) -> bool:
    """Check that a value is a bool. 0 and 1 are refused."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a bool; give True or False.")
    return value


def check_choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """Check that a value is one of the allowed strings."""
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} is not known; give one of {', '.join(map(repr, allowed))}{nearest(value, allowed)}."
        )
    return str(value)


def check_instance(name: str, value: Any, kind: type[T]) -> T:
    """Check that a value is of a config class; return its default instance for None."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give a {kind.__name__}(...).")
    return value


def check_names(name: str, value: Any) -> list[str]:
    """Check that a value is a list of one or more strings. A single string is refused: its letters would be the names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r} is {with_article(type(value).__name__)}; give a list of names.")
    if not value or not all(isinstance(each, str) and each for each in value):
        raise ConfigError(f"{name}={value!r} is not a list of names; give one or more strings.")
    return list(value)


def check_component(name: str, value: Any) -> str:
    """Check that a value can be one component of a path: no separators, no ``..``, no dot at its start."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{name}={value!r} cannot name a folder; give 1 to 128 letters, digits, '.', '_' or '-', not starting with '.'."
        )
    return value


def split_path(name: str, folder: str) -> tuple[str, str]:
    """Split a path or URI of a folder of runs into the folder that it is in, and its name.

    Args:
        name: The argument, for messages.
        folder: A path, made absolute, also with ``~``; or a URI.

    Raises:
        ConfigError: It is the root of a file system or a bucket, or its name cannot be that of a folder of runs.
    """
    is_uri = "://" in folder
    path, mark, query = folder.partition("?") if is_uri else (os.path.abspath(os.path.expanduser(folder)), "", "")
    above, _, last = path.rstrip("/").rpartition("/")
    if is_uri and (not above or above.endswith((":", ":/"))):
        raise ConfigError(
            f"{name}={folder!r} is a whole bucket; give a folder in it, such as {folder.rstrip('/')}/runs."
        )
    if not last:
        raise ConfigError(f"{name}={folder!r} is the root of the file system; give a folder in it, such as /runs.")
    return (above or "/") + mark + query, check_component(name, last)


def check_exceptions(name: str, value: Any) -> tuple[type[Exception], ...]:
    """Check that a value is an exception class, or a tuple or list of such classes; return a tuple."""
    kinds = (value,) if isinstance(value, type) else value
    if not isinstance(kinds, (tuple, list)):
        raise ConfigError(f"{name}={value!r} is not a tuple of exception classes; give one such as (ConnectionError,).")
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise ConfigError(f"{name} has {kind!r}, which is not a class of exceptions; give a subclass of Exception.")
    return tuple(kinds)


def from_mapping(cls: type[T], mapping: Mapping[str, Any], what: str) -> T:
    """Make the config dataclass ``cls`` from a dict. An unknown key is refused with the nearest field."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise UnknownArgumentError(
                f"{what} has no field {key!r}{nearest(key, known)}; its fields are {', '.join(known)}."
            )
    return cls(**mapping)
