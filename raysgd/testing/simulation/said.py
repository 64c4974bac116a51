"""What simulated workers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raysgd.session import events as e


def reports(first: int, count: int = 1, rows: list[Any] | None = None) -> e.Reports:
    """Reports ``first`` to ``first + count - 1`` of a rank; each row has its number as the metric ``n``."""
    made = [[float(n), float(n), {"n": n}] for n in range(first, first + count)] if rows is None else rows
    return e.Reports(first, count, json.dumps(made).encode())


def saved(call: int = 0, reports: int = 1, metrics: Mapping[str, Any] | None = None, **flags: Any) -> e.Saved:
    """The ``call``-th save of a rank, after ``reports`` reports."""
    fields = {
        "time_total_s": float(reports),
        "all_ranks": False,
        "is_files": False,
        "trusted": False,
        **flags,
    }
    return e.Saved(
        call=call, reports=reports, metrics=None if metrics is None else json.dumps(metrics).encode(), **fields
    )


def part(call: int = 0, *files: str, consumed: int | None = None) -> e.PartSafe:
    """The part of save ``call`` is on storage; its rank stood after so many rows of its dataset, where it has one."""
    entries = tuple((name, 10, 1) for name in files)
    if consumed is None:
        return e.PartSafe(call, entries)
    return e.PartSafe(call, entries, {"data": {"train": {"epoch": 2, "consumed": consumed, "num_rows": 100}}})


def failed(text: str = "boom", at: float = 0.0, *, type_name: str = "builtins.ValueError", **flags: bool) -> e.Failed:
    """An exception that train_func raised at ``at``; ``in_collective`` or ``in_setup`` where it was that."""
    return e.Failed(b"pickle of " + text.encode(), type_name, text, f"Traceback: {text}", at, **flags)


def broken(text: str = "connection closed by peer", at: float = 0.0) -> e.Failed:
    """A collective that failed."""
    return failed(text, at, type_name="builtins.RuntimeError", in_collective=True)


RETURNED = e.Returned(b"value", 5)
