"""The events that workers send, as a simulated run needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raysgd.checkpoint.storage.names import FileEntry
from raysgd.session import events as e


def reports(first: int, count: int = 1, rows: list[Any] | None = None, closes: int | None = None) -> e.Reports:
    """Return reports ``first`` to ``first + count - 1`` of a rank; each row has its number as the metric ``n``.

    Args:
        first: The number of the first report.
        count: How many.
        rows: What is reported instead.
        closes: The call of the save that the first report follows, in a loop that saves first.
    """
    made = [[float(n), float(n), {"n": n}] for n in range(first, first + count)] if rows is None else rows
    return e.Reports(first, count, json.dumps(made).encode(), () if closes is None else ((first, closes),))


def scoring(
    metrics: Mapping[str, Any], call: int = 0, first: int | None = None, time_total_s: float = 0.0
) -> e.Reports:
    """Return the report of a loop that saves first, after its ``call``-th save; it is number ``first``, by default ``call``."""
    return reports(call if first is None else first, 1, [[0.0, time_total_s, dict(metrics)]], call)


def saved(call: int = 0, reports: int = 1, metrics: Mapping[str, Any] | None = None, **flags: Any) -> e.Saved:
    """Return the ``call``-th save of a rank, after ``reports`` reports; by default of a loop that saves once a round."""
    order = {"awaits_round": reports == call}
    settings = {"all_ranks": False, "is_files": False, "allow_pickle": False, **order, **flags}
    encoded = None if metrics is None else json.dumps(metrics).encode()
    return e.Saved(call=call, reports=reports, metrics=encoded, time_total_s=float(reports), **settings)


def part(call: int = 0, *files: str, consumed: int | None = None) -> e.PartSafe:
    """Return the event that the part of save ``call`` is on storage. ``consumed``: the rank's rows of its dataset so far."""
    entries = tuple(FileEntry(name, 10, 1) for name in files)
    if consumed is None:
        return e.PartSafe(call, entries)
    return e.PartSafe(call, entries, {"data": {"train": {"epoch": 2, "consumed": consumed, "num_rows": 100}}})


def failed(text: str = "boom", at: float = 0.0, *, type_name: str = "builtins.ValueError", **flags: bool) -> e.Failed:
    """Return an exception that train_func raised at ``at``; ``flags``: ``in_collective`` or ``in_setup``."""
    return e.Failed(b"pickle of " + text.encode(), type_name, text, f"Traceback: {text}", at, **flags)


def broken(text: str = "connection closed by peer", at: float = 0.0) -> e.Failed:
    """Return the error of a broken collective."""
    return failed(text, at, type_name="builtins.RuntimeError", in_collective=True)


RETURNED = e.Returned(b"value", 5)
