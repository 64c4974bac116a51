"""Merges the reports of all ranks into rounds, and makes a result of each round. Pure; every reader of a run has a merger.

A round is the i-th report of each rank. It is emitted once every rank that is still running has made its i-th report.
`AwaitedMetrics`, which the TrainerActor has, finds out which metrics of ``reduce`` are never reported.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from raysgd._util.json import decode_rows
from raysgd._util.metric_names import find_keys, flatten, listed, nearest, set_at, value_at
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.errors import ConfigError
from raysgd.result import AUTOMATIC_KEYS, Result

Reduce = Mapping[str, str]


REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": lambda values: math.fsum(values) if any(isinstance(v, float) for v in values) else sum(values),
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
}


def check_reduce(reduce: Any) -> dict[str, str]:
    """Check and copy the user's ``reduce``.

    Raises:
        ConfigError: It is not a dict of known reductions, or names a key that raysgd sets itself.
    """
    if reduce is None:
        return {}
    if not isinstance(reduce, Mapping):
        raise ConfigError(
            f"reduce={reduce!r} is not a dict; give {{'loss': 'mean', ...}} with {', '.join(REDUCTIONS)}."
        )
    for key, name in reduce.items():
        if not isinstance(name, str) or name not in REDUCTIONS:
            raise ConfigError(f"reduce[{key!r}]={name!r} is not known: give one of {', '.join(REDUCTIONS)}.")
        if not isinstance(key, str):
            raise ConfigError(f"reduce has the key {key!r}, which is not the name of a metric; give a string.")
        if key in AUTOMATIC_KEYS:
            raise ConfigError(f"reduce={{{key!r}: ...}}: raysgd sets {key} itself, once for all ranks; leave it out.")
    return dict(reduce)


def reduce_metrics(
    workers: Sequence[Mapping[str, Any]], reduce: Reduce, replicas: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the metrics of the lowest rank, with those named in ``reduce`` computed over all ranks that reported them.

    Args:
        workers: Each rank's metrics, in rank order.
        reduce: Reduction by the name of a metric, ``val/acc`` for a nested one. ``mean``, ``sum``, ``min`` and ``max`` skip
            values that are not numbers. In ``mean`` and ``sum`` the first rank of each replica of the model counts that has one,
            as the ranks of a replica read the same rows.
        replicas: Of which replica of the model each rank holds a part. None: each rank holds a whole one.
    """
    merged = dict(workers[0])
    for metric, name in reduce.items():
        found = [
            (replica, keys, value_at(metrics, keys))
            for replica, metrics in zip(replicas or range(len(workers)), workers, strict=True)
            if (keys := find_keys(metrics, metric)) is not None
        ]
        counted = [
            (replica, value)
            for replica, _, value in found
            if name in ("last", "first") or isinstance(value, (int, float))
        ]
        values = [value for _, value in counted]
        if name in ("mean", "sum") and replicas is not None:
            values = list(dict(reversed(counted)).values())  # the first rank's, of each replica
        if values:
            set_at(merged, found[0][1], _reduced(name, values))
    return merged


def reduce_by_rank(
    metrics: Mapping[int, Mapping[str, Any]], reduce: Reduce, workers_per_replica: int
) -> dict[str, Any]:
    """Return what `reduce_metrics` makes of the metrics of some ranks."""
    ranks = sorted(metrics)
    return reduce_metrics([metrics[rank] for rank in ranks], reduce, replicas_of(ranks, workers_per_replica))


def replicas_of(ranks: Iterable[int], workers_per_replica: int) -> list[int] | None:
    """Return of which replica of the model each rank holds a part; None if each holds a whole one."""
    return None if workers_per_replica == 1 else [rank // workers_per_replica for rank in ranks]


def _reduced(name: str, values: Sequence[Any]) -> Any:
    if name in ("min", "max") and any(value != value for value in values):
        return math.nan  # min and max of a list with NaN depend on its order
    return REDUCTIONS[name](values)


class AwaitedMetrics:
    """Finds out which metrics of ``reduce`` no report of a run has had. Pure.

    It decodes all reports while it knows no names, and later only those whose text has the begin and the end of a missing name.

    Attributes:
        missing: The names that no report has had, in the order of ``reduce``.
    """

    def __init__(self, reduce: Reduce) -> None:
        self.missing = tuple(reduce)
        self._known: dict[str, None] = {}

    def feed(self, rows: bytes) -> None:
        """Take encoded reports of a rank."""
        if not self.missing or (self._known and not any(_may_have(rows, name) for name in self.missing)):
            return
        for _, _, metrics in decode_rows(rows):
            self.missing = tuple(name for name in self.missing if find_keys(metrics, name) is None)
            self._known.update(dict.fromkeys(flatten(metrics)))

    def describe(self) -> str:
        """Return the missing names and those that were reported, for a message."""
        names = ", ".join(f"{name!r}{nearest(name, self._known)}" for name in self.missing)
        return f"{names}, which reduce= names; the reports have {listed(self._known)}"


def _may_have(rows: bytes, name: str) -> bool:
    is_written_as_it_is = json.dumps(name) == f'"{name}"'  # other characters may be escaped
    first, last = name.partition("/")[0], name.rpartition("/")[2]
    return not is_written_as_it_is or (f'"{first}'.encode() in rows and f'{last}":'.encode() in rows)


Row = list[Any]  # [timestamp, time_total_s, metrics]


class RoundMerger:
    """Makes the results of a run from its frames, both in order."""

    def __init__(self, reduce: Reduce | None = None) -> None:
        self._reduce = dict(reduce or {})
        self._attempt = 0
        self._world_size = 0
        self._workers_per_replica = 1
        self._iteration = 0
        self._iterations_before = 0
        self._time_before_s = 0.0
        self._rows: list[deque[Row]] = []
        self._running: set[int] = set()
        self._num_waited_for = 0  # running ranks without a report of the next round
        self._last_round: tuple[tuple[int, ...], list[Row]] = ((), [])

    def feed(self, frame: Frame) -> Iterator[Result]:
        """Return the results that ``frame`` completes."""
        if frame.kind == frames.REPORTS:
            if frame.attempt == self._attempt:
                rows = self._rows[frame.rank]
                was_waited_for = not rows and frame.rank in self._running
                rows.extend(decode_rows(frame.rows))
                self._num_waited_for -= was_waited_for and bool(rows)
                yield from self._complete()
        elif frame.kind == frames.ATTEMPT:
            self._begin(frame)
        elif frame.kind == frames.RANK_DONE:
            if frame.rank in self._running:
                self._running.remove(frame.rank)
                self._num_waited_for -= not self._rows[frame.rank]
            yield from self._complete()
        elif frame.kind == frames.ATTEMPT_END:
            yield from self._finish(frame.data.get("keep_rounds"))

    def _begin(self, frame: Frame) -> None:
        self._attempt = frame.attempt
        self._world_size = frame.data["world_size"]
        self._workers_per_replica = frame.data.get("workers_per_replica", 1)  # journals of earlier versions have none
        self._iterations_before = self._iteration = frame.data["iterations_before"]
        self._time_before_s = frame.data["time_before_s"]
        self._rows = [deque() for _ in range(self._world_size)]
        self._running = set(range(self._world_size))
        self._num_waited_for = self._world_size
        self._last_round = ((), [])

    def _complete(self) -> Iterator[Result]:
        """Return the rounds that every running rank has made; after all have left, the rounds that any rank has made."""
        while self._num_waited_for <= 0:  # otherwise a report costs the same whatever the number of ranks
            waited_for = self._running or {rank for rank, rows in enumerate(self._rows) if rows}
            ready = min((len(self._rows[rank]) for rank in waited_for), default=0)
            if not ready:
                return
            yield from self._emit(ready)
            self._num_waited_for = sum(not self._rows[rank] for rank in self._running)

    def _finish(self, keep_rounds: int | None) -> Iterator[Result]:
        """End the attempt; returns its rounds up to ``keep_rounds`` (None: all), also those that not all ranks made."""
        self._running = set()
        while any(self._rows) and (keep_rounds is None or self._iteration - self._iterations_before < keep_rounds):
            yield from self._emit(1)
        for rows in self._rows:
            rows.clear()
        self._attempt = 0  # reports after the attempt's end make no rounds

    def _emit(self, count: int) -> Iterator[Result]:
        """Return up to ``count`` rounds of the ranks that have rows; fewer if a rank that has left has fewer."""
        ranks = tuple(rank for rank, rows in enumerate(self._rows) if rows)
        queues = [self._rows[rank] for rank in ranks]
        count = min(count, *map(len, queues))
        reduce, automatic = self._reduce, {"world_size": self._world_size, "attempt": self._attempt}
        times = {rank: row[1] for rank, row in zip(*self._last_round, strict=True)}
        last = times.get(ranks[0], self._time_before_s)
        replicas = replicas_of(ranks, self._workers_per_replica)
        for iteration in range(self._iteration + 1, self._iteration + count + 1):
            rows = [queue.popleft() for queue in queues]
            workers = [row[2] for row in rows]
            timestamp, total, metrics = rows[0]
            result = Result(reduce_metrics(workers, reduce, replicas) if reduce else metrics, workers, ranks)
            result["training_iteration"] = iteration
            result["timestamp"] = timestamp
            result["time_this_iter_s"] = total - last
            result["time_total_s"] = last = total
            result.update(automatic)
            self._iteration = iteration
            self._last_round = (ranks, rows)
            yield result


def merge_results(sequence: Sequence[Frame], reduce: Mapping[str, str], *, is_done: bool) -> list[Result]:
    """Return the results of a run's frames by iteration; of an iteration that was repeated after a failure, the latest."""
    merger = RoundMerger(reduce)
    by_iteration: dict[int, Result] = {}
    last = 0
    for frame in sequence:
        if frame.kind == frames.ATTEMPT:
            last = frame.data.get("iterations_before", 0)
        for result in merger.feed(frame):
            last = result["training_iteration"]
            by_iteration[last] = result
    # A run that stops at a time of day may end at an earlier iteration than one of its failed attempts had reached.
    return [by_iteration[iteration] for iteration in sorted(by_iteration) if iteration <= last or not is_done]
