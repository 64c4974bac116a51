"""The way out of a worker: everything in order, coalesced, at once where it is urgent or the line is idle."""

from __future__ import annotations

import json
import math
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._util.fast_json import decode
from raysgd.errors import MetricError
from raysgd.session.events import Reports, Scored, Warned, WorkerEvent
from raysgd.session.metrics import Deferred
from raysgd.session.outbox import Outbox, encode_rows

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
        [metrics["n"] for _, _, metrics in decode(event.rows)] if isinstance(event, Reports) else event.message  # type: ignore[union-attr]
        for event in events
    ]


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_batch_holds_everything_in_the_order_in_which_it_was_put() -> None:
    outbox = Outbox(0)
    for number in (0, 1, 2):
        outbox.put_report(row(number))
    outbox.put(Warned("a"))
    outbox.put(Warned("b"))
    outbox.put_report(row(3))
    assert shown(outbox.drain(0)) == [[0, 1, 2], "a", "b", [3]]
    assert outbox.drain(0) == []


def test_reports_are_counted_through_all_batches() -> None:
    outbox = Outbox(0)
    counted = []
    for count in (2, 1, 3):
        for number in range(count):
            outbox.put_report(row(number))
        (event,) = outbox.drain(0)
        assert isinstance(event, Reports)
        counted.append((event.first, event.count))
    assert counted == [(0, 2), (2, 1), (3, 3)]


@given(st.lists(st.sampled_from(["report", "event", "drain"]), max_size=30))
def test_however_it_is_cut_into_batches_nothing_is_lost_doubled_or_overtaken(actions: list[str]) -> None:
    outbox = Outbox(0)
    put: list[Any] = []
    got: list[WorkerEvent] = []
    for action in [*actions, "drain"]:
        if action == "report":
            outbox.put_report(row(len(put)))
            put.append(len(put))
        elif action == "event":
            outbox.put(Warned(str(len(put))))
            put.append(str(len(put)))
        else:
            got += outbox.drain(0)
    flat: list[Any] = []
    for item in shown(got):
        flat += item if isinstance(item, list) else [item]
    assert flat == put


def test_a_writer_that_never_pauses_does_not_keep_a_batch_from_leaving() -> None:
    outbox = Outbox(0)
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            outbox.put_report(row(number))
            number += 1
        outbox.put(Warned(str(number)))

    writer = threading.Thread(target=write)
    writer.start()
    events: list[WorkerEvent] = []
    while len(events) < 4:
        events += outbox.drain(10)
    done.set()
    writer.join()
    while not isinstance(events[-1], Warned):
        events += outbox.drain(10)
    numbers = [n for item in shown(events[:-1]) for n in item]
    assert numbers == list(range(int(shown(events)[-1])))


# -- when --------------------------------------------------------------------------------------------------------------


def test_after_an_idle_gap_a_batch_leaves_at_once() -> None:
    clock = Clock()
    outbox = Outbox(NEVER_S, clock)
    outbox.put_report(row(0))
    assert shown(outbox.drain(0)) == [[0]]
    clock.now += NEVER_S
    outbox.put_report(row(1))
    assert shown(outbox.drain(0)) == [[1]]


def test_under_load_a_batch_waits_for_the_interval_and_takes_what_came_meanwhile() -> None:
    outbox = Outbox(0.02)
    outbox.put_report(row(0))
    outbox.drain(0)
    began = time.monotonic()
    outbox.put_report(row(1))
    outbox.put_report(row(2))
    assert shown(outbox.drain(0)) == [[1, 2]]
    assert time.monotonic() - began >= 0.015


def test_an_urgent_event_takes_what_waits_with_it_at_once() -> None:
    outbox = Outbox(NEVER_S)
    outbox.put_report(row(0))
    outbox.drain(0)
    outbox.put_report(row(1))
    outbox.put(Warned("now"), urgent=True)
    assert shown(outbox.drain(0)) == [[1], "now"]


def test_an_urgent_event_ends_the_wait_of_a_batch_that_is_held_back() -> None:
    outbox = Outbox(NEVER_S)
    outbox.put_report(row(0))
    outbox.drain(0)
    outbox.put_report(row(1))
    got: list[WorkerEvent] = []
    drainer = threading.Thread(target=lambda: got.extend(outbox.drain(0)))
    drainer.start()
    outbox.put(Warned("now"), urgent=True)
    drainer.join(timeout=30)
    assert shown(got) == [[1], "now"]


def test_waking_ends_a_wait_and_is_not_seen() -> None:
    outbox = Outbox(NEVER_S)
    drainer = threading.Thread(target=outbox.drain, args=(NEVER_S,))
    drainer.start()
    outbox.wake()
    drainer.join(timeout=30)
    assert not drainer.is_alive()
    outbox.wake()
    assert outbox.drain(0) == []


def test_without_an_event_a_drain_ends_after_its_time() -> None:
    outbox = Outbox(0)
    began = time.monotonic()
    assert outbox.drain(0.02) == []
    assert time.monotonic() - began >= 0.015


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were() -> None:
    values = {"int": 2**63, "float": 0.1, "text": "é\u2028\n\ud800", "none": None, "list": [True, {"a": 1.5}]}
    rows: Any = [(1.5, 0.5, values), (2.5, 1.5, {})]
    assert decode(encode_rows(rows)) == [[1.5, 0.5, values], [2.5, 1.5, {}]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_not_made_null(value: float) -> None:
    data = encode_rows([(1.0, 2.0, {"x": value, "y": None})])
    assert repr(decode(data)) == repr([[1.0, 2.0, {"x": value, "y": None}]])
    assert repr(json.loads(data)) == repr([[1.0, 2.0, {"x": value, "y": None}]])


def test_device_scalars_are_read_when_the_batch_is_made() -> None:
    outbox = Outbox(0)
    outbox.put_report((1.0, 2.0, {"n": Deferred(lambda: 7), "inner": [Deferred(lambda: math.nan)]}))
    outbox.put_report(row(8))
    assert shown(outbox.drain(0)) == [[7, 8]]


def test_a_row_is_one_line() -> None:
    assert b"\n" not in encode_rows([(1.0, 2.0, {"text": "a\nb\r\x85\u2028"})])


# ------------------------------------------------------------------------------- metrics that cannot be read


def broken() -> Deferred:
    def read() -> float:
        raise RuntimeError("the device was lost")

    return Deferred(read)


def test_what_was_reported_before_a_metric_that_cannot_be_read_is_sent() -> None:
    outbox = Outbox(0)
    outbox.put_report(row(0))
    outbox.put_report((1001.0, 1.0, {"n": 1, "loss": broken()}))
    outbox.put_report(row(2))
    outbox.put(Warned("after"))
    assert shown(outbox.drain(NEVER_S)) == [[0], "after"]
    assert str(outbox.unreadable) == "report(loss=...) could not be read: RuntimeError: the device was lost"
    assert outbox.unreadable is not None and outbox.unreadable.key == "loss"
    outbox.put_report(row(3))
    assert outbox.drain(NEVER_S) == []


def test_settling_waits_for_what_is_on_its_way_and_raises_what_could_not_be_read() -> None:
    outbox = Outbox(0)
    got: list[WorkerEvent] = []
    is_over = threading.Event()

    def drain() -> None:
        while not is_over.is_set():
            got.extend(outbox.drain(NEVER_S))

    thread = threading.Thread(target=drain)
    thread.start()
    outbox.put_report(row(0))
    outbox.settle()
    assert shown(got) in ([[0]], [])  # read, if not handed on yet
    outbox.put_report((1001.0, 1.0, {"n": 10**5000}))
    with pytest.raises(MetricError, match=r"report\(n=...\) could not be read"):
        outbox.settle()
    is_over.set()
    outbox.wake()
    thread.join(10)
    assert not thread.is_alive()


def test_what_was_handed_on_has_been_sent() -> None:
    outbox = Outbox(10.0)
    sent: list[WorkerEvent] = []
    is_over = threading.Event()

    def drain() -> None:
        while not is_over.is_set():
            batch = outbox.drain(NEVER_S)
            time.sleep(0.05)  # it is on its way to where it survives this process
            sent.extend(batch)

    thread = threading.Thread(target=drain)
    thread.start()
    for n in range(3):
        outbox.put_report(row(n))
        outbox.hand_on()
        assert shown(sent)[-1][-1] == n
    is_over.set()
    outbox.wake()
    thread.join(10)
    assert not thread.is_alive()


def test_the_score_of_a_checkpoint_that_cannot_be_read() -> None:
    outbox = Outbox(0)
    outbox.put_with_metrics(Scored(0, None), {"loss": broken()})
    assert outbox.drain(NEVER_S) == [Scored(0, None)]
    assert outbox.unreadable is not None and outbox.unreadable.key == "loss"
