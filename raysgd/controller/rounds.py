"""From the reports of each rank to rounds, and from rounds to results. Pure; every reader of a run has its own.

A round is the i-th report of each rank, emitted once every rank that is still running has made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from raysgd._util.fast_json import decode
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.reducing import Reduce, reduce_metrics
from raysgd.result import Result

Row = list[Any]  # [timestamp, time_total_s, metrics]


class RoundMerger:
    """Takes the frames of a run in order and gives its results in order."""

    def __init__(self, reduce: Reduce | None = None) -> None:
        self._reduce = dict(reduce or {})
        self._attempt = 0
        self._world_size = 0
        self._iteration = 0
        self._iterations_before = 0
        self._time_before_s = 0.0
        self._rows: list[deque[Row]] = []
        self._running: set[int] = set()
        self._last_round: tuple[tuple[int, ...], list[Row]] = ((), [])

    def feed(self, frame: Frame) -> Iterator[Result]:
        """The results that ``frame`` completes."""
        if frame.kind == frames.REPORTS:
            if frame.attempt == self._attempt:
                self._rows[frame.rank].extend(decode(frame.rows))
                yield from self._complete()
        elif frame.kind == frames.ATTEMPT:
            self._begin(frame)
        elif frame.kind == frames.RANK_DONE:
            self._running.discard(frame.rank)
            yield from self._complete()
        elif frame.kind == frames.ATTEMPT_END:
            yield from self._finish(frame.data.get("keep_rounds"))

    def _begin(self, frame: Frame) -> None:
        self._attempt = frame.attempt
        self._world_size = frame.data["world_size"]
        self._iterations_before = self._iteration = frame.data["iterations_before"]
        self._time_before_s = frame.data["time_before_s"]
        self._rows = [deque() for _ in range(self._world_size)]
        self._running = set(range(self._world_size))
        self._last_round = ((), [])

    def _complete(self) -> Iterator[Result]:
        """The rounds every running rank has made; after all have left, those any rank has."""
        while True:
            waited_for = self._running or {rank for rank, rows in enumerate(self._rows) if rows}
            ready = min((len(self._rows[rank]) for rank in waited_for), default=0)
            if not ready:
                return
            yield from self._emit(ready)

    def _finish(self, keep_rounds: int | None) -> Iterator[Result]:
        """The attempt is over: rounds up to ``keep_rounds`` are emitted with the ranks that made them; None: all."""
        self._running = set()
        while any(self._rows) and (keep_rounds is None or self._iteration - self._iterations_before < keep_rounds):
            yield from self._emit(1)
        for rows in self._rows:
            rows.clear()
        self._attempt = 0  # reports that come after its end make no rounds

    def _emit(self, count: int) -> Iterator[Result]:
        """Up to ``count`` rounds of the ranks that have rows; ends early where a rank that has left runs out."""
        ranks = tuple(rank for rank, rows in enumerate(self._rows) if rows)
        queues = [self._rows[rank] for rank in ranks]
        count = min(count, *map(len, queues))
        reduce, automatic = self._reduce, {"world_size": self._world_size, "attempt": self._attempt}
        times = {rank: row[1] for rank, row in zip(*self._last_round, strict=True)}
        last = times.get(ranks[0], self._time_before_s)
        for iteration in range(self._iteration + 1, self._iteration + count + 1):
            rows = [queue.popleft() for queue in queues]
            workers = [row[2] for row in rows]
            timestamp, total, metrics = rows[0]
            result = Result(reduce_metrics(workers, reduce) if reduce else metrics, workers, ranks)
            result["training_iteration"] = iteration
            result["timestamp"] = timestamp
            result["time_this_iter_s"] = total - last
            result["time_total_s"] = last = total
            result.update(automatic)
            self._iteration = iteration
            self._last_round = (ranks, rows)
            yield result
