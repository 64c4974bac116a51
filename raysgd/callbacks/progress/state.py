"""The state of a run as the progress display shows it. The stream's reader thread writes it, the drawing thread reads it.

Storing a result is one append: results are processed only when the display is drawn.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd.callbacks.values import (
    age_s,
    clip,
    end_state,
    flatten,
    in_one_line,
    is_finite,
    one_line,
    split_automatic,
    time_left_s,
)
from raysgd.result import Event, Result, RunInfo

_MAX_RECENT = 256  # of the results between two drawings, only this many last ones enter the histories
_MAX_NOTES = 3
_HUGE = 1e290  # larger values are drawn as this, so that sums stay finite


class History:
    """A number over the whole run, in a bounded number of buckets. When all are full, neighbours are merged.

    Attributes:
        smallest: The least value ever added.
        largest: The greatest value ever added.
    """

    def __init__(self, max_buckets: int = 128) -> None:
        self.smallest, self.largest = math.inf, -math.inf
        self._max_buckets = max_buckets
        self._buckets: list[float] = []
        self._per_bucket = 1
        self._sum, self._count = 0.0, 0  # of the bucket that is being filled

    def add(self, value: float) -> None:
        self.smallest, self.largest = min(self.smallest, value), max(self.largest, value)
        value = min(max(value, -_HUGE), _HUGE)
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._per_bucket:
            self._buckets.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._buckets) == self._max_buckets:
            self._buckets = [(first + second) / 2 for first, second in zip(*[iter(self._buckets)] * 2, strict=True)]
            self._per_bucket *= 2

    def means(self) -> list[float]:
        """Return the means of the buckets, oldest first."""
        return [*self._buckets, self._sum / self._count] if self._count else list(self._buckets)


@dataclass
class Snapshot:
    """The run at one moment, for drawing."""

    info: RunInfo
    world_size: int
    state: str = "starting"
    error: str = ""
    elapsed_s: float = 0.0
    iteration: int = 0
    num_iterations: int | None = None
    left_s: float | None = None
    attempt: int = 1
    metrics: dict[str, Any] = field(default_factory=dict)
    histories: dict[str, History] = field(default_factory=dict)
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    checkpoint: dict[str, Any] | None = None
    checkpoint_age_s: float = 0.0
    notes: Sequence[str] = ()
    num_warnings: int = 0


class ProgressState:
    """Collects a run's results and events. Thread-safe.

    Args:
        info: The run.
        num_iterations: The number of results that the run will have, if that is known.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, info: RunInfo, num_iterations: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._start_at = clock() - age_s(info.started_s)
        self._end_at: float | None = None
        self._outcome = "done"
        self._checkpoint_at = 0.0
        self._lock = threading.Lock()
        self._recent: deque[Result] = deque(maxlen=_MAX_RECENT)
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._now = Snapshot(info, info.num_workers, num_iterations=num_iterations)

    def result(self, result: Result) -> None:
        with self._lock:
            self._recent.append(result)

    def event(self, event: Event) -> None:
        data, now = event.data, self._now
        with self._lock:
            if event.kind in ("sample", "worker_up"):
                now.workers.setdefault(data["rank"], {}).update(data)
            elif event.kind == "checkpoint":
                now.checkpoint, self._checkpoint_at = dict(data), self._clock()
            elif event.kind == "attempt_start":
                self._begin_attempt(data)
            elif event.kind == "warning":
                self._notes.append(_first_line(str(data.get("message", ""))))
            elif event.kind == "run_end":  # callbacks and pending writes follow
                self._end_at, now.state = self._clock(), "ending"
                self._outcome = data.get("kind", "done")
            elif (note := note_text(event)) and (event.kind, now.state) != ("stop", "stopping"):
                self._notes.append(note)
                now.state = {"stop": "stopping", "failure": "recovering"}.get(event.kind, now.state)

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            self._end_at = self._clock() if self._end_at is None else self._end_at
            self._now.state = end_state(error, self._outcome)
            self._now.error = "" if error is None else one_line(error)
            late = [_first_line(text) for text in self._now.info.warnings[-_MAX_NOTES:]]
            self._notes.extend(line for line in late if line not in self._notes)

    def snapshot(self) -> Snapshot:
        with self._lock:
            self._process_recent()
            now_s, workers = self._clock(), self._now.workers
            return replace(
                self._now,
                elapsed_s=(now_s if self._end_at is None else self._end_at) - self._start_at,
                metrics=dict(self._now.metrics),
                histories=dict(self._now.histories),
                workers={rank: dict(workers[rank]) for rank in sorted(workers)},
                checkpoint_age_s=now_s - self._checkpoint_at,
                notes=list(self._notes),
                num_warnings=len(self._now.info.warnings),
            )

    def _begin_attempt(self, data: dict[str, Any]) -> None:
        now = self._now
        now.attempt = data.get("attempt", now.attempt)
        now.world_size = data.get("world_size", now.world_size)
        now.state = "running"
        now.workers = {rank: row for rank, row in now.workers.items() if rank < now.world_size}

    def _process_recent(self) -> None:
        now = self._now
        while self._recent:
            own, automatic = split_automatic(self._recent.popleft())
            now.iteration = automatic.get("training_iteration", now.iteration)
            now.left_s = time_left_s(now.iteration, automatic.get("time_total_s") or 0.0, now.num_iterations)
            now.attempt = automatic.get("attempt", now.attempt)
            now.world_size = automatic.get("world_size", now.world_size)
            if now.state == "starting":
                now.state = "running"
            for key, value in flatten(own).items():
                now.metrics[key] = value
                if is_finite(value):
                    now.histories.setdefault(key, History()).add(value)


def note_text(event: Event) -> str:
    """Format what interrupts the run, or a stop, by which a callback or the user ends it, as one line; others as ``""``."""
    data = event.data
    if event.kind == "stop":
        return f"stopping: {in_one_line(data.get('why', ''))}"
    if event.kind == "regroup":
        return f"the group forms again: {clip(in_one_line(data.get('why', '')), 120)}"
    if event.kind == "continued":
        return str(data.get("why", ""))
    if event.kind != "failure":
        return ""
    ranks = ", ".join(map(str, data.get("ranks") or ()))
    error = clip(in_one_line(data.get("error", "")), 120)
    action = "giving up" if data.get("action") == "give up" else data.get("action")
    return (f"rank {ranks} failed: {error}" if ranks else error) + (f"; {action}" if action else "")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
