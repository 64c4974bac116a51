"""The rows of the table of runs: state, config, metrics and lineage of each. Runs anywhere, without Ray."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from raysgd._util.metric_names import flatten
from raysgd.callbacks.values import as_float, clip, is_number
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import RaySGDError
from raysgd.runs.state import RunState
from raysgd.viewer.catalog import Catalog

#: Seconds that one request spends on reading all reports of runs; the next request continues.
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
            with_ranges: Rows have the lowest and the highest value of each metric, as soon as all reports were read.

        Returns:
            ``version``; ``ids`` of all rows, newest first; ``rows``, those that have changed; ``num_unread``, how many have
            no ranges yet.
        """
        with self._lock:
            before, self._version = self._version, self._version + 1
            found = self._catalog.read_states()
            ends_at = time.monotonic() + _BUDGET_S
            num_unread = 0
            for number, folder, state in found:
                row = make_row(number, folder, self._catalog.folder, state)
                if with_ranges and not self._read_ranges(number, row["updated"], ends_at):
                    num_unread += 1
                row["ranges"] = self._ranges.get(number, (0.0, {}))[1]
                if number not in self._rows or self._rows[number][1] != row:
                    self._rows[number] = self._version, row
            changed = [self._rows[number] for number, _, _ in found]
            if not any(version == self._version for version, _ in changed):
                self._version = before
            return {
                "version": self._version,
                "ids": [number for number, _, _ in found],
                "rows": [row for version, row in changed if version > after],
                "num_unread": num_unread,
            }

    def _read_ranges(self, number: int, updated: float, ends_at: float) -> bool:
        """Read the ranges of a run's metrics, if they are not known and there is time; return whether they are known."""
        if number in self._ranges and self._ranges[number][0] == updated:
            return True
        if time.monotonic() > ends_at:
            return False
        try:
            ranges = self._catalog.open_run(number).ranges()
        except RaySGDError:  # the row says that the run cannot be read
            ranges = {}
        self._ranges[number] = updated, ranges
        return True


def make_row(number: int, folder: Storage, root: Storage, state: RunState | None) -> dict[str, Any]:
    """Return the row of a run.

    Args:
        number: Its number in the list.
        folder: Its folder.
        root: The folder of all runs.
        state: Its state; None if it cannot be read.
    """
    path = folder.path_of("").removeprefix(root.path_of("")).strip("/") or folder.name
    trainer, _, name = path.rpartition("/")
    row: dict[str, Any] = {"id": number, "name": name, "trainer": trainer, "search": trainer.rpartition("/")[0]}
    if state is None:
        empty = {"iteration": 0, "started": 0.0, "updated": 0.0, "begin": 0, "from": "", "why": ""}
        return {**row, **empty, "state": "unreadable", "config": {}, "metrics": {}, "workers": 0, "failures": 0}
    starts = [event.data for event in state.events if event.kind == "attempt_start"]
    source = str((state.events[0].data.get("resumed_from") if state.events else None) or "")
    return {
        **row,
        "state": state.state,
        "why": clip(state.message, _MAX_TEXT),
        "iteration": state.iteration,
        "begin": int(starts[0].get("iterations_before", 0)) if starts else 0,
        "from": "/".join(source.rstrip("/").split("/")[-3:]),
        "started": state.started_s,
        "updated": state.ended_s,
        "workers": state.world_size,
        "failures": state.num_failures,
        "config": as_values(state.description.get("config", {})),
        "metrics": {name: plain_value(value) for name, value in state.own_metrics.items()},
    }


def as_values(tree: Any) -> dict[str, Any]:
    """Return the leaves of a config by names such as ``optimizer.lr``: numbers, bools and None as they are, others as text."""
    if not isinstance(tree, Mapping):
        return {"": plain_value(tree)}
    return {name.replace("/", "."): plain_value(value) for name, value in flatten(tree).items()}


def plain_value(value: Any) -> Any:
    """Return a value as JSON and JavaScript can hold it: a number that is not finite becomes its text."""
    if is_number(value):
        number = as_float(value)
        return number if math.isfinite(number) else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(number), "NaN")
    if value is None or isinstance(value, bool):
        return value
    return clip(value if isinstance(value, str) else json.dumps(value, default=str), _MAX_TEXT)
