"""The queue between the training thread and the worker's stream: single events go in, batches of events come out.

The training thread (and the checkpoint writer's thread) puts, the stream's thread drains. Putting a report is one append to
a C queue. Draining flushes at once after an idle gap. Under load at most one batch leaves per ``flush_interval_s``, because
a message costs the controller the same CPU whatever its size. A part of a checkpoint that is safe does not wait either, unless
parts follow each other quickly: the last one is what the commit of all ranks waits for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from raysgd._util.json import encode, encode_rows
from raysgd.errors import MetricError
from raysgd.session.events import PartSafe, Reports, Saved, WorkerEvent
from raysgd.session.metrics import read_deferred

if TYPE_CHECKING:
    from raysgd.session.media import Image

Row = tuple[float, float, dict[str, Any]]

#: Reports that may wait for the stream before ``report`` waits too. Without a bound, a loop that does nothing but report
#: would fill the memory of its node.
MAX_PENDING = 200_000
#: Seconds for the stream's thread to read the reported values, which may wait for a device.
_SETTLE_TIMEOUT_S = 60.0
_WAKE = object()


class _Unencoded(NamedTuple):
    """A save whose metrics are still to be read and encoded."""

    event: Saved
    metrics: dict[str, Any]


class EventQueue:
    """Events on their way out of the worker, in the order in which they were put.

    Args:
        flush_interval_s: See below.
        clock: Returns seconds that only grow.
        keep_image: Gets the images of a report before it is sent. It does not raise.

    Attributes:
        flush_interval_s: The shortest time between two batches.
        unreadable: The error of a metric that was accepted and could not be read later, such as one on a device that failed.
            No report is sent from that one on; the session raises the error in the training thread.
    """

    def __init__(
        self,
        flush_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        keep_image: Callable[[Image], None] = lambda image: None,
    ) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.flush_interval_s = flush_interval_s
        self._clock = clock
        self._keep_image = keep_image
        self._urgent = threading.Event()
        self._last_flush = self._last_part = float("-inf")
        self._num_reports = 0
        self.unreadable: MetricError | None = None

    def put_report(self, row: Row, closes: int | None = None) -> None:
        """Put one report; called by ``report``. ``closes``: the call of the save whose checkpoint belongs to its round."""
        self._queue.put(row if closes is None else (*row, closes))
        if self._queue.qsize() > MAX_PENDING:
            time.sleep(0.001)

    def put(self, event: WorkerEvent, *, urgent: bool = False) -> None:
        """Put an event; an urgent one does not wait for the flush interval."""
        self._queue.put(event)
        if urgent or (isinstance(event, PartSafe) and self._is_part_due()):
            self._urgent.set()

    def put_with_metrics(self, event: Saved, metrics: dict[str, Any] | None) -> None:
        """Put a save whose metrics the stream's thread encodes, since reading them may wait for a device."""
        self._queue.put(event if metrics is None else _Unencoded(event, metrics))

    def _is_part_due(self) -> bool:
        """Return whether a part may have a batch of its own; the controller gets at most half as many of these as of others."""
        now = self._clock()
        if now - self._last_part < 2 * self.flush_interval_s:
            return False
        self._last_part = now
        return True

    def wake(self) -> None:
        """Make a waiting `drain` return what there is."""
        self._queue.put(_WAKE)
        self._urgent.set()

    def settle(self) -> None:
        """Wait until every metric that was put so far has been read.

        Raises:
            MetricError: A metric could not be read.
        """
        settled = threading.Event()
        self._queue.put(settled)
        self._urgent.set()
        settled.wait(_SETTLE_TIMEOUT_S)
        if self.unreadable is not None:
            raise self.unreadable

    def drain(self, timeout_s: float) -> list[WorkerEvent]:
        """Return the next batch; empty after ``timeout_s`` without an event. Called by the stream's thread only."""
        try:
            items = [self._queue.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        wait_s = self._last_flush + self.flush_interval_s - self._clock()
        if wait_s > 0:
            self._urgent.wait(wait_s)
        self._urgent.clear()
        for _ in range(self._queue.qsize()):  # what is there now: more keeps arriving
            items.append(self._queue.get())
        self._last_flush = self._clock()
        return self._batched(items)

    def _batched(self, items: list[Any]) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        rows: list[Row] = []
        closes: list[tuple[int, int]] = []
        for item in items:
            if type(item) is tuple:
                if len(item) > 3:
                    closes.append((self._num_reports + len(rows), item[3]))
                rows.append(item[:3])
            elif item is not _WAKE:
                self._close_rows(rows, closes, events)
                if type(item) is threading.Event:
                    item.set()
                else:
                    events.append(self._encoded(item) if type(item) is _Unencoded else item)
        self._close_rows(rows, closes, events)
        return events

    def _encoded(self, item: _Unencoded) -> WorkerEvent:
        try:
            return replace(item.event, metrics=encode(read_deferred(item.metrics)))
        except Exception as error:
            self.unreadable = self.unreadable or _name_unreadable(item.metrics, error)
            return item.event

    def _close_rows(self, rows: list[Row], closes: list[tuple[int, int]], events: list[WorkerEvent]) -> None:
        if rows and self.unreadable is None:
            try:
                data = encode_rows(rows)
            except Exception:
                data = self._encode_readable(rows)
            if rows:
                first, self._num_reports = self._num_reports, self._num_reports + len(rows)
                readable = tuple(each for each in closes if each[0] < self._num_reports)
                events.append(Reports(first, len(rows), data, readable))
        rows.clear()
        closes.clear()

    def _encode_readable(self, rows: list[Row]) -> bytes:
        """Encode rows with images or scalars on a device, read now; drop the first unreadable one and those after it."""
        for number, row in enumerate(rows):
            try:
                rows[number] = (*row[:2], read_deferred(row[2], self._keep_image))
                encode_rows(rows[number : number + 1])
            except Exception as error:
                self.unreadable = _name_unreadable(row[2], error)
                del rows[number:]
                break
        return encode_rows(rows)


def _name_unreadable(metrics: dict[str, Any], error: Exception) -> MetricError:
    for key, value in metrics.items():
        try:
            encode(read_deferred(value))
        except Exception as cause:
            error, name = cause, key
            break
    else:
        name = ", ".join(metrics)
    unreadable = MetricError(f"report({name}=...) could not be read: {type(error).__name__}: {error}", key=name)
    unreadable.__cause__ = error
    return unreadable
