"""Metrics as loggers need them: flat, plain Python values, strict JSON. Pure functions, free of any framework.

A metric is what ``report`` let through (numbers, text, None, arrays of numbers, and dicts and lists of these), yet
nothing here fails on others: what cannot be converted becomes its ``str``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from raysgd.callbacks.formatting import as_float, is_number
from raysgd.result import AUTOMATIC_KEYS

_SCALARS = (bool, int, float, str, type(None))


def plain(value: Any) -> Any:
    """A numpy or framework scalar as a Python number, an array as a list; anything else as it is."""
    if isinstance(value, (*_SCALARS, dict, list, tuple)):
        return value
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def flatten(metrics: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Nested dicts as one dict: ``{"val": {"loss": 1}}`` is ``{"val/loss": 1}``. Lists stay lists."""
    return dict(_leaves(metrics, "", separator))


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numeric leaves of the metrics, flattened; nan and infinities are numbers, bools and text are not."""
    return {key: as_float(value) for key, value in flatten(metrics).items() if is_number(value)}


def split_automatic(result: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The user's metrics, and the keys raysgd added."""
    own = {key: value for key, value in result.items() if key not in AUTOMATIC_KEYS}
    return own, {key: value for key, value in result.items() if key in AUTOMATIC_KEYS}


def strict_json(value: Any) -> str:
    """One line of JSON that any reader takes: nan is ``null``, infinities are ``1e999`` and ``-1e999``.

    These are numbers by JSON's grammar, and pandas, Python and JavaScript read them as infinities (jq as the largest
    number it has), where ``NaN`` and ``Infinity`` are no JSON at all.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_default)
    except (TypeError, ValueError):  # nan or an infinity, or a key that is no string
        return _encode(value)


def _leaves(metrics: Mapping[Any, Any], prefix: str, separator: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}{separator}", separator)
        else:
            yield name, plain(value)


def _default(value: Any) -> Any:
    converted = plain(value)
    return str(value) if converted is value else converted


def _encode(value: Any) -> str:
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "null" if math.isnan(value) else ("1e999" if value > 0 else "-1e999")
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_encode(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_encode, value)) + "]"
    return json.dumps(value if isinstance(value, _SCALARS) else str(value))
