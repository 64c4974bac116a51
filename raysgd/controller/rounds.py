"""Counts the rounds of a run, and makes a result of the reports of each round. Pure.

A round is the i-th report of each rank. It is complete once every rank that is still running has made its i-th report. The
TrainerActor counts rounds by `RoundCount`, without a look into the reports; each reader makes results by `RoundMerger`.
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
        self._has_warned = False

    def feed(self, rows: bytes) -> None:
        """Take encoded reports of a rank."""
        if not self.missing or (self._known and not any(_may_have(rows, name) for name in self.missing)):
            return
        for _, _, metrics in decode_rows(rows):
            self.missing = tuple(name for name in self.missing if find_keys(metrics, name) is None)
            self._known.update(dict.fromkeys(flatten(metrics)))

    def warn_of_first_round(self) -> str | None:
        """Return a warning after the first round, once: a name may be wrong, or be reported in some rounds only."""
        if not self.missing or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"the reports of the first round have no {self._describe()}. A later round may have it; without it, nothing is "
            "reduced by this name."
        )

    def warn_of_run(self) -> str | None:
        """Return a warning after a success without a metric. Hours of training do not fail by a name."""
        if not self.missing:
            return None
        return f"no report of the run had {self._describe()}. raysgd.load_run(run_dir, reduce={{...}}) reduces what was reported."

    def _describe(self) -> str:
        names = ", ".join(f"{name!r}{nearest(name, self._known)}" for name in self.missing)
        return f"{names}, which reduce= names; the reports have {listed(self._known)}"


def _may_have(rows: bytes, name: str) -> bool:
    is_written_as_it_is = json.dumps(name) == f'"{name}"'  # other characters may be escaped
    first, last = name.partition("/")[0], name.rpartition("/")[2]
    return not is_written_as_it_is or (f'"{first}'.encode() in rows and f'{last}":'.encode() in rows)


class RoundCount:
    """Counts the rounds of an attempt. A frame costs the same whatever the number of ranks.

    Attributes:
        attempt: The number of the attempt.
        iteration: The last complete round, counted from the run's beginning. Every rank that is still running has reported it;
            once all ranks have left, any rank has.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.iteration = 0
        self._iterations_before = 0
        self._counts: list[int] = []
        self._running: set[int] = set()
        self._whole = 0
        self._num_missing = 0  # running ranks whose report of the next round is missing

    def feed(self, frame: Frame) -> bool:
        """Count the next frame; returns False for reports that complete no round, which readers need not get yet."""
        if frame.kind == frames.ATTEMPT:
            self.attempt = frame.attempt
            self._iterations_before = frame.data.get("iterations_before", 0)
            self._counts = [0] * frame.data["world_size"]
            self._running = set(range(frame.data["world_size"]))
        elif frame.attempt != self.attempt:
            return True
        elif frame.kind == frames.REPORTS:
            before = self._counts[frame.rank]
            self._counts[frame.rank] = count = before + frame.data["count"]
            if frame.rank in self._running:
                if before > self._whole or count <= self._whole:
                    return False
                self._num_missing -= 1
            if self._num_missing:  # otherwise a report would cost a look at all ranks
                return False
        elif frame.kind == frames.RANK_DONE and frame.rank in self._running:
            self._running.remove(frame.rank)
            self._num_missing -= self._counts[frame.rank] <= self._whole
            if self._num_missing:
                return True
        else:
            return True
        counts = [self._counts[rank] for rank in self._running]
        self._whole = min(counts) if counts else max(self._counts)
        self._num_missing = counts.count(self._whole)
        self.iteration = self._iterations_before + self._whole
        return True


class RoundMerger:
    """Makes the results of a run from its frames, both in order."""

    def __init__(self, reduce: Reduce | None = None) -> None:
        self._reduce = dict(reduce or {})
        self._rounds = RoundCount()
        self._attempt = self._number = 0
        self._world_size = 0
        self._workers_per_replica = 1
        self._iteration = 0
        self._iterations_before = 0
        self._time_before_s = 0.0
        self._rows: list[deque[list[Any]]] = []
        self._last_round: tuple[tuple[int, ...], list[list[Any]]] = ((), [])

    def feed(self, frame: Frame) -> Iterator[Result]:
        """Return the results that ``frame`` completes."""
        self._rounds.feed(frame)
        if frame.kind == frames.ATTEMPT:
            # Rounds that not all ranks reported count, too, if the attempt before is continued from memory.
            yield from self._take(frame.data["iterations_before"])
            self._begin(frame)
        elif frame.kind == frames.REPORTS and frame.attempt == self._attempt:
            self._rows[frame.rank].extend(frame.decoded)
        until: float = self._rounds.iteration
        if frame.kind == frames.ATTEMPT_END:  # with the rounds to keep (None: all), also those that not all ranks made
            keep = frame.data.get("keep_rounds")
            until = math.inf if keep is None else self._iterations_before + keep
        yield from self._take(until)
        if frame.kind == frames.ATTEMPT_END:  # reports after it make no rounds
            self._attempt = -1

    def _take(self, until: float) -> Iterator[Result]:
        """Return the results of further rounds."""
        while self._iteration < until and any(self._rows):  # again, if a rank that has left has fewer rows
            ranks = tuple(rank for rank, rows in enumerate(self._rows) if rows)
            queues = [self._rows[rank] for rank in ranks]
            count = int(min(until - self._iteration, *map(len, queues)))
            times = {rank: row[1] for rank, row in zip(*self._last_round, strict=True)}
            last = times.get(ranks[0], self._time_before_s)
            automatic = {"world_size": self._world_size, "attempt": self._number}
            for iteration in range(self._iteration + 1, self._iteration + count + 1):
                made = [queue.popleft() for queue in queues]
                workers = [row[2] for row in made]
                timestamp, total, metrics = made[0]
                if self._reduce:
                    metrics = reduce_metrics(workers, self._reduce, replicas_of(ranks, self._workers_per_replica))
                result = Result(metrics, workers, ranks)
                result["training_iteration"] = iteration
                result["timestamp"] = timestamp
                result["time_this_iter_s"] = total - last
                result["time_total_s"] = last = total
                result.update(automatic)
                self._iteration = iteration
                self._last_round = (ranks, made)
                yield result

    def _begin(self, frame: Frame) -> None:
        self._attempt = self._number = frame.attempt
        self._world_size = frame.data["world_size"]
        self._workers_per_replica = frame.data.get("workers_per_replica", 1)  # journals of earlier versions have none
        self._iterations_before = self._iteration = frame.data["iterations_before"]
        self._time_before_s = frame.data["time_before_s"]
        self._rows = [deque() for _ in range(self._world_size)]
        self._last_round = ((), [])


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
