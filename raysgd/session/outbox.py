"""The way from the training thread to the worker's stream: a queue on one side, batches of events on the other.

Two threads: the training thread (and the checkpoint writer's) puts, the stream's thread drains. Putting a report is one
append to a C queue. Draining flushes at once after an idle gap; under load at most one batch leaves per
``flush_interval_s``, since a message costs the controller the same CPU whatever is in it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from raysgd._util.fast_json import encode
from raysgd.errors import MetricError
from raysgd.session.events import Reports, Saved, Scored, WorkerEvent
from raysgd.session.metrics import Deferred, read_deferred

Row = tuple[float, float, dict[str, Any]]

#: Reports that may wait for the stream before ``report`` waits too. The controller takes far more than training makes;
#: without a bound a loop that only reports would fill the memory of its node.
MAX_PENDING = 200_000
#: Seconds for the stream's thread to read what was reported, which may wait for a device.
_SETTLE_TIMEOUT_S = 60.0
_WAKE = object()


class _Unencoded(NamedTuple):
    """An event whose metrics are still to be read and encoded."""

    event: Saved | Scored
    metrics: dict[str, Any]

    def encoded(self) -> Saved | Scored:
        return replace(self.event, metrics=encode(read_deferred(self.metrics)))


class Outbox:
    """Events on their way out, in the order in which they were put.

    Attributes:
        flush_interval_s: Least time between two batches.
        unreadable: A metric that was taken at the call and could not be read later, such as of a device that failed. From
            its report on none is sent; the session raises it in the training thread.
    """

    def __init__(self, flush_interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.flush_interval_s = flush_interval_s
        self._clock = clock
        self._urgent = threading.Event()
        self._last_flush = float("-inf")
        self._num_reports = 0
        self.unreadable: MetricError | None = None

    def put_report(self, row: Row) -> None:
        """Called by ``report``."""
        self._queue.put(row)
        if self._queue.qsize() > MAX_PENDING:
            time.sleep(0.001)

    def put(self, event: WorkerEvent, *, urgent: bool = False) -> None:
        """Put an event; an urgent one does not wait for the flush interval."""
        self._queue.put(event)
        if urgent:
            self._urgent.set()

    def put_with_metrics(self, event: Saved | Scored, metrics: dict[str, Any] | None) -> None:
        """Put an event; its metrics are encoded by the stream's thread, which may wait for a device."""
        self._queue.put(event if metrics is None else _Unencoded(event, metrics))

    def wake(self) -> None:
        """End a `drain` that waits, with what there is."""
        self._queue.put(_WAKE)
        self._urgent.set()

    def settle(self) -> None:
        """Wait until every metric put so far was read.

        Raises:
            MetricError: One of them could not be.
        """
        settled = threading.Event()
        self._queue.put(settled)
        self._urgent.set()
        settled.wait(_SETTLE_TIMEOUT_S)
        if self.unreadable is not None:
            raise self.unreadable

    def hand_on(self) -> None:
        """Wait until all that was put so far has been sent, and would arrive though this process died.

        Raises:
            MetricError: A metric of it could not be read.
        """
        self.settle()
        self.settle()  # the stream's thread comes back for it when it has sent what it had taken

    def drain(self, timeout_s: float) -> list[WorkerEvent]:
        """The next batch; empty after ``timeout_s`` without an event. Called by the stream's thread alone."""
        try:
            items = [self._queue.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        wait_s = self._last_flush + self.flush_interval_s - self._clock()
        if wait_s > 0:
            self._urgent.wait(wait_s)
        self._urgent.clear()
        for _ in range(self._queue.qsize()):  # what is there now, not what keeps arriving
            items.append(self._queue.get())
        self._last_flush = self._clock()
        return self._batched(items)

    def _batched(self, items: list[Any]) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        rows: list[Row] = []
        for item in items:
            if type(item) is tuple:
                rows.append(item)
            elif item is not _WAKE:
                self._close_rows(rows, events)
                if type(item) is threading.Event:
                    item.set()
                else:
                    events.append(self._encoded(item) if type(item) is _Unencoded else item)
        self._close_rows(rows, events)
        return events

    def _encoded(self, item: _Unencoded) -> WorkerEvent:
        try:
            return item.encoded()
        except Exception as error:
            self.unreadable = self.unreadable or _name_unreadable(item.metrics, error)
            return item.event

    def _close_rows(self, rows: list[Row], events: list[WorkerEvent]) -> None:
        if rows and self.unreadable is None:
            try:
                data = encode_rows(rows)
            except Exception:
                data = self._encode_readable(rows)
            if rows:
                events.append(Reports(self._num_reports, len(rows), data))
                self._num_reports += len(rows)
        rows.clear()

    def _encode_readable(self, rows: list[Row]) -> bytes:
        """The rows before the first that cannot be read; the others are dropped from ``rows``."""
        for number, row in enumerate(rows):
            try:
                encode_rows([row])
            except Exception as error:
                self.unreadable = _name_unreadable(row[2], error)
                del rows[number:]
                break
        return encode_rows(rows)


def _name_unreadable(metrics: dict[str, Any], error: Exception) -> MetricError:
    """The error that names the metric at fault."""
    for key, value in metrics.items():
        try:
            encode(read_deferred(value))
        except Exception as cause:
            error, name = cause, key
            break
    else:
        name = ", ".join(metrics)
    told = MetricError(f"report({name}=...) could not be read: {type(error).__name__}: {error}", key=name)
    told.__cause__ = error
    return told


def encode_rows(rows: list[Row]) -> bytes:
    """Rows as JSON; NaN and infinities as Python's json writes them."""
    try:
        return encode(rows)
    except TypeError:  # a Deferred among them: json has no cheaper way to tell
        plain = [(timestamp, total, read_deferred(metrics)) for timestamp, total, metrics in rows]
        return encode(plain)


__all__ = ["Deferred", "Outbox", "Row", "encode_rows"]
