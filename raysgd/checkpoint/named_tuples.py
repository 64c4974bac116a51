"""Named tuples, as optimizers of JAX keep their state in: saved by the names of their fields.

A file cannot say which class to import, so what comes back is a named tuple made anew: of the same name and fields, equal to
the one that was saved, without its methods. `raysgd.jax.restore` puts the values into the user's own again.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, TypeAlias

Json: TypeAlias = Any

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_MAX_FIELDS = 1000


def find_encoder(value: Any) -> Callable[[Any, Any], Json] | None:
    """The encoder of a named tuple that is nothing beside its fields, or None."""
    names = getattr(type(value), "_fields", None)
    if not isinstance(value, tuple) or not isinstance(names, tuple) or getattr(value, "__dict__", None):
        return None
    fits = len(value) == len(names) <= _MAX_FIELDS and all(map(_is_name, (type(value).__name__, *names)))
    return _encode if fits else None


def _encode(encoder: Any, value: Any) -> Json:
    node = ["named", type(value).__name__, list(value._fields)]
    for name, item in zip(value._fields, value, strict=True):
        encoder.path.append(name)
        node.append(encoder.encode(item))
        encoder.path.pop()
    return node


def decode(decoder: Any, node: Json) -> Any:
    """A named tuple of its node."""
    _, name, fields, *items = node
    kind = _make(name, tuple(fields))
    values = []
    for field, item in zip(fields, items, strict=True):
        decoder.path.append(field)
        values.append(decoder.decode(item))
        decoder.path.pop()
    return kind(*values)


@functools.lru_cache(maxsize=256)
def _make(name: str, fields: tuple[str, ...]) -> Any:
    if len(fields) > _MAX_FIELDS or not all(map(_is_name, (name, *fields))):
        raise ValueError("these are no names of a class and its fields")
    return collections.namedtuple(name, fields)  # refuses keywords, and a name that comes twice


def _is_name(name: Any) -> bool:
    return type(name) is str and _NAME.fullmatch(name) is not None
