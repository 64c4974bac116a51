"""The event queue of a worker: batches keep the order, and urgent or rare events are sent at once."""

from __future__ import annotations

import json
import math
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._util.json import decode_rows, encode_rows
from raysgd.errors import MetricError
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import PartSafe, Reports, Saved, Warned, WorkerEvent
from raysgd.session.metrics import Deferred

NEVER_S = 3600.0  # a test that waits for this fails by its timeout


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def row(number: int) -> tuple[float, float, dict[str, Any]]:
    return (1000.0 + number, float(number), {"n": number})


def shown(events: list[WorkerEvent]) -> list[Any]:
    """Warnings by their text, reports by the metrics in them."""
    return [
        [metrics["n"] for _, _, metrics in decode_rows(event.rows)] if isinstance(event, Reports) else event.message  # type: ignore[union-attr]
        for event in events
    ]


# -- order -------------------------------------------------------------------------------------------------------------


def test_batch_keeps_the_order_of_its_events() -> None:
    event_queue = EventQueue(0)
    for number in (0, 1, 2):
        event_queue.put_report(row(number))
    event_queue.put(Warned("a"))
    event_queue.put(Warned("b"))
    event_queue.put_report(row(3))
    assert shown(event_queue.drain(0)) == [[0, 1, 2], "a", "b", [3]]
    assert event_queue.drain(0) == []


def test_report_waits_for_a_moment_above_200_000_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("raysgd.session.event_queue.time.sleep", pauses.append)
    event_queue = EventQueue(0)
    for _ in range(200_000):
        event_queue.put_report(row(0))
    assert pauses == []
    event_queue.put_report(row(0))
    assert pauses == [0.001]


def test_reports_are_numbered_across_batches() -> None:
    event_queue = EventQueue(0)
    counted = []
    for count in (2, 1, 3):
        for number in range(count):
            event_queue.put_report(row(number))
        (event,) = event_queue.drain(0)
        assert isinstance(event, Reports)
        counted.append((event.first, event.count))
    assert counted == [(0, 2), (2, 1), (3, 3)]


@given(st.lists(st.sampled_from(["report", "event", "drain"]), max_size=30))
def test_batches_lose_repeat_and_reorder_no_event(actions: list[str]) -> None:
    event_queue = EventQueue(0)
    put: list[Any] = []
    got: list[WorkerEvent] = []
    for action in [*actions, "drain"]:
        if action == "report":
            event_queue.put_report(row(len(put)))
            put.append(len(put))
        elif action == "event":
            event_queue.put(Warned(str(len(put))))
            put.append(str(len(put)))
        else:
            got += event_queue.drain(0)
    flat: list[Any] = []
    for item in shown(got):
        flat += item if isinstance(item, list) else [item]
    assert flat == put


def test_batch_is_sent_while_events_keep_arriving() -> None:
    event_queue = EventQueue(0)
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            event_queue.put_report(row(number))
            number += 1
        event_queue.put(Warned(str(number)))

    writer = threading.Thread(target=write)
    writer.start()
    events: list[WorkerEvent] = []
    while len(events) < 4:
        events += event_queue.drain(10)
    done.set()
    writer.join()
    while not isinstance(events[-1], Warned):
        events += event_queue.drain(10)
    numbers = [n for item in shown(events[:-1]) for n in item]
    assert numbers == list(range(int(shown(events)[-1])))


# -- when --------------------------------------------------------------------------------------------------------------


def test_batch_after_an_idle_gap_is_sent_at_once() -> None:
    clock = Clock()
    event_queue = EventQueue(NEVER_S, clock)
    event_queue.put_report(row(0))
    assert shown(event_queue.drain(0)) == [[0]]
    clock.now += NEVER_S
    event_queue.put_report(row(1))
    assert shown(event_queue.drain(0)) == [[1]]


def test_batch_under_load_waits_for_the_flush_interval() -> None:
    event_queue = EventQueue(0.02)
    event_queue.put_report(row(0))
    began = time.monotonic()
    event_queue.drain(0)
    event_queue.put_report(row(1))
    event_queue.put_report(row(2))
    assert shown(event_queue.drain(0)) == [[1, 2]]
    assert time.monotonic() - began >= 0.015


def test_urgent_event_is_sent_at_once_with_those_before_it() -> None:
    event_queue = EventQueue(NEVER_S)
    event_queue.put_report(row(0))
    event_queue.drain(0)
    event_queue.put_report(row(1))
    event_queue.put(Warned("now"), urgent=True)
    assert shown(event_queue.drain(0)) == [[1], "now"]


def test_part_of_a_checkpoint_is_sent_at_once_unless_parts_follow_each_other_quickly() -> None:
    clock = Clock()
    event_queue = EventQueue(0.02, clock)
    event_queue.put_report(row(0))
    event_queue.drain(0)
    event_queue.flush_interval_s = NEVER_S
    event_queue.put(PartSafe(0, ()))
    assert event_queue.drain(0) == [PartSafe(0, ())], "it does not wait"
    event_queue.put(PartSafe(1, ()))
    assert not event_queue._urgent.is_set()
    clock.now += 2 * NEVER_S
    event_queue.put(PartSafe(2, ()))
    assert event_queue._urgent.is_set()


def test_urgent_event_ends_the_wait_for_the_flush_interval() -> None:
    event_queue = EventQueue(NEVER_S)
    event_queue.put_report(row(0))
    event_queue.drain(0)
    event_queue.put_report(row(1))
    got: list[WorkerEvent] = []
    drainer = threading.Thread(target=lambda: got.extend(event_queue.drain(0)))
    drainer.start()
    event_queue.put(Warned("now"), urgent=True)
    drainer.join(timeout=30)
    assert shown(got) == [[1], "now"]


def test_wake_ends_a_drain_without_an_event() -> None:
    event_queue = EventQueue(NEVER_S)
    drainer = threading.Thread(target=event_queue.drain, args=(NEVER_S,))
    drainer.start()
    event_queue.wake()
    drainer.join(timeout=30)
    assert not drainer.is_alive()
    event_queue.wake()
    assert event_queue.drain(0) == []


def test_drain_without_an_event_ends_after_its_timeout() -> None:
    event_queue = EventQueue(0)
    began = time.monotonic()
    assert event_queue.drain(0.02) == []
    assert time.monotonic() - began >= 0.015


# -- rows --------------------------------------------------------------------------------------------------------------


def test_encoded_rows_decode_to_the_same_rows() -> None:
    values = {"int": 2**63, "float": 0.1, "text": "é\u2028\n\ud800", "none": None, "list": [True, {"a": 1.5}]}
    rows: Any = [(1.5, 0.5, values), (2.5, 1.5, {})]
    assert decode_rows(encode_rows(rows)) == [[1.5, 0.5, values], [2.5, 1.5, {}]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_standard_json_and_read_back(value: float) -> None:
    metrics = {"x": value, "y": None, "list": [1, [value]], "val": {"x": value, "a/b": value}, "huge": 10**400}
    data = encode_rows([(1.0, 2.0, metrics), (2.0, 3.0, {"x": None}), (3.0, 4.0, {"text": 'NaN"]'})])
    assert repr(decode_rows(data)) == repr(
        [[1.0, 2.0, metrics], [2.0, 3.0, {"x": None}], [3.0, 4.0, {"text": 'NaN"]'}]]
    )
    strict = json.loads(data, parse_constant=pytest.fail)
    assert strict[0][2] == {"x": None, "y": None, "list": [1, [None]], "val": {"x": None, "a/b": None}, "huge": 10**400}
    assert strict[0][3][0] == [["x"], json.dumps(value)]
    assert [len(row) for row in strict] == [4, 3, 3]


@pytest.mark.parametrize("data", [b'[[1.0,2.0,{"x":NaN}]]', b'[[1.0,2.0,{"x":Infinity}]]'])
def test_rows_of_earlier_versions_are_read(data: bytes) -> None:
    assert repr(decode_rows(data)) == repr(json.loads(data))


def test_device_scalars_are_read_when_the_batch_is_encoded() -> None:
    event_queue = EventQueue(0)
    event_queue.put_report((1.0, 2.0, {"n": Deferred(lambda: 7), "inner": [Deferred(lambda: math.nan)]}))
    event_queue.put_report(row(8))
    assert shown(event_queue.drain(0)) == [[7, 8]]


def test_encoded_row_has_no_line_break() -> None:
    assert b"\n" not in encode_rows([(1.0, 2.0, {"text": "a\nb\r\x85\u2028"})])


# ------------------------------------------------------------------------------- metrics that cannot be read


def broken() -> Deferred:
    def read() -> float:
        raise RuntimeError("the device was lost")

    return Deferred(read)


def test_reports_before_an_unreadable_metric_are_sent() -> None:
    event_queue = EventQueue(0)
    event_queue.put_report(row(0))
    event_queue.put_report((1001.0, 1.0, {"n": 1, "loss": broken()}))
    event_queue.put_report(row(2))
    event_queue.put(Warned("after"))
    assert shown(event_queue.drain(NEVER_S)) == [[0], "after"]
    assert str(event_queue.unreadable) == "report(loss=...) could not be read: RuntimeError: the device was lost"
    assert event_queue.unreadable is not None and event_queue.unreadable.key == "loss"
    event_queue.put_report(row(3))
    assert event_queue.drain(NEVER_S) == []


def test_settle_waits_for_all_metrics_and_raises_the_unreadable_one() -> None:
    event_queue = EventQueue(0)
    got: list[WorkerEvent] = []
    is_over = threading.Event()

    def drain() -> None:
        while not is_over.is_set():
            got.extend(event_queue.drain(NEVER_S))

    thread = threading.Thread(target=drain)
    thread.start()
    event_queue.put_report(row(0))
    event_queue.settle()
    assert shown(got) in ([[0]], [])  # read, if not handed on yet
    event_queue.put_report((1001.0, 1.0, {"n": 10**5000}))
    with pytest.raises(MetricError, match=r"report\(n=...\) could not be read"):
        event_queue.settle()
    is_over.set()
    event_queue.wake()
    thread.join(10)
    assert not thread.is_alive()


def test_unreadable_score_of_a_checkpoint_is_reported() -> None:
    event_queue = EventQueue(0)
    saved = Saved(0, 0, 0.0, all_ranks=False, is_files=False, allow_pickle=False, metrics=None)
    event_queue.put_with_metrics(saved, {"loss": broken()})
    assert event_queue.drain(NEVER_S) == [saved]
    assert event_queue.unreadable is not None and event_queue.unreadable.key == "loss"


def test_report_that_a_checkpoint_belongs_to_is_marked_by_its_number() -> None:
    event_queue = EventQueue(0)
    for n in range(5):
        event_queue.put_report((1000.0, 0.0, {"n": n}), {1: 7, 3: 8}.get(n))
        if n == 1:
            event_queue.put(Warned("between two batches"))
    first, _, second = event_queue.drain(NEVER_S)
    assert isinstance(first, Reports) and isinstance(second, Reports)
    assert (first.first, first.closes) == (0, ((1, 7),))
    assert (second.first, second.closes) == (2, ((3, 8),))
    assert json.loads(second.rows) == [[1000.0, 0.0, {"n": n}] for n in (2, 3, 4)]


def test_unreadable_report_closes_no_checkpoint() -> None:
    event_queue = EventQueue(0)
    event_queue.put_report((1000.0, 0.0, {"n": 0}), 1)
    event_queue.put_report((1000.0, 0.0, {"n": broken()}), 2)
    (made,) = event_queue.drain(NEVER_S)
    assert isinstance(made, Reports) and (made.count, made.closes) == (1, ((0, 1),))
