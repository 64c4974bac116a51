"""Parses JSON from files that may be damaged or hostile: bounded depth, no duplicate names, no NaN literals."""

from __future__ import annotations

import json
from typing import Any

from raysgd.errors import CheckpointCorruptError


def parse_json(data: bytes, where: str, *, max_depth: int | None = None) -> Any:
    """Parse ``data``.

    Args:
        data: UTF-8 text.
        where: The file's path, for messages.
        max_depth: How deeply lists and objects may nest, for callers that walk the value by recursion.

    Raises:
        CheckpointCorruptError: It is not valid JSON within these bounds.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:  # the C scanner counts its own depth, so it raises and does not crash
        raise CheckpointCorruptError(f"{where}: its JSON nests too deeply") from error
    except ValueError as error:
        raise CheckpointCorruptError(f"{where} is not valid JSON: {error}") from error
    if max_depth is not None and _deeper_than(value, max_depth):
        raise CheckpointCorruptError(f"{where}: its JSON nests deeper than {max_depth} levels")
    return value


def _deeper_than(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, (list, dict))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
