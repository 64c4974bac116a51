"""The rows of the table of runs: what lists show of each, and the ranges of its metrics. Runs anywhere, without Ray."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raysgd._util.metric_names import flatten
from raysgd.callbacks.values import as_float, clip, is_number
from raysgd.errors import RaySGDError
from raysgd.runs.state import RunState

if TYPE_CHECKING:
    from raysgd.viewer.catalog import Catalog

#: Seconds that one request spends on reading all reports of runs; the next one continues.
_BUDGET_S = 0.5
_MAX_TEXT = 200


class RunTable:
    """The rows of the runs in a catalog. Thread-safe.

    Args:
        catalog: The runs.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._version = 0
        self._rows: dict[int, tuple[int, dict[str, Any]]] = {}
        self._ranges: dict[int, tuple[float, dict[str, list[float]]]] = {}

    def read(self, after: int = -1, *, with_ranges: bool = False) -> dict[str, Any]:
        """Return the rows that have changed. Blocks.

        Args:
            after: The ``version`` of an earlier answer. -1: return all.
            with_ranges: Rows also have ``ranges``, the lowest and the highest value of each metric.

        Returns:
            ``version``; ``ids`` of all rows, newest first; ``runs``, the rows that have changed; ``num_unread``, the number of
            rows whose ranges are still to be read.
        """
        with self._lock:
            rows = self._catalog.list_runs()
            ends_at = time.monotonic() + _BUDGET_S
            num_unread = 0
            for row in rows:
                if with_ranges:
                    num_unread += not self._read_ranges(row["id"], row["updated"], ends_at)
                row = {**row, "ranges": self._ranges.get(row["id"], (0.0, {}))[1]}
                if self._rows.get(row["id"], (0, None))[1] != row:
                    self._rows[row["id"]] = self._version + 1, row
            present = {row["id"]: self._rows[row["id"]] for row in rows}
            self._rows = present
            self._version = max([self._version, *(version for version, _ in present.values())])
            return {
                "version": self._version,
                "ids": list(present),
                "runs": [row for version, row in present.values() if version > after],
                "num_unread": num_unread,
            }

    def _read_ranges(self, number: int, updated: float, ends_at: float) -> bool:
        """Read the ranges of a run's metrics, if there is time; return whether they are those of now."""
        if number in self._ranges and self._ranges[number][0] == updated:
            return True
        left_s = ends_at - time.monotonic()
        if left_s < 0:
            return False
        try:
            ranges = self._catalog.open_run(number).ranges(left_s)
        except RaySGDError:  # its row says that it cannot be read
            ranges = {}
        if ranges is None:
            return False
        self._ranges[number] = updated, ranges
        return True


def row_of(state: RunState) -> dict[str, Any]:
    """Return what a row shows of a run's state.

    Returns:
        ``run_dir``, ``state``, ``iteration``, ``started``, ``updated``, ``world_size``, ``num_failures``; ``why``: the text of
        its end; ``first``: its iterations before it began; ``source``: the checkpoint that it began with, or empty;
        ``metrics``: the last values, by name; ``config``: values, by name; ``title``, ``tags``, ``notes``: see `Annotations`.
    """
    starts = [event.data for event in state.events if event.kind == "attempt_start"]
    return {
        "run_dir": state.run_dir,
        "state": state.state,
        "why": clip(state.message, _MAX_TEXT),
        "iteration": state.iteration,
        "first": int(starts[0].get("iterations_before", 0)) if starts else 0,
        "source": str((starts[0].get("checkpoint") if starts else None) or ""),
        "started": state.started_s,
        "updated": state.ended_s,
        "world_size": state.world_size,
        "num_failures": state.num_failures,
        "metrics": {name: _value(value) for name, value in state.own_metrics.items()},
        "config": as_values(state.description.get("config", {})),
        **vars(state.annotations),
    }


def as_values(tree: Any) -> dict[str, Any]:
    """Return the leaves of a config by names such as ``optimizer.lr``: numbers, bools and None as they are, others as text."""
    if not isinstance(tree, Mapping):
        return {"": _value(tree)}
    return {name.replace("/", "."): _value(value) for name, value in flatten(tree).items()}


def _value(value: Any) -> Any:
    """Return a value as JSON holds it; a number that is not finite becomes the text that JavaScript has for it."""
    if is_number(value):
        number = as_float(value)
        return number if math.isfinite(number) else json.dumps(number)
    if value is None or isinstance(value, bool):
        return value
    return clip(value if isinstance(value, str) else json.dumps(value, default=str), _MAX_TEXT)
