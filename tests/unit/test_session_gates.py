"""The gate at which a rank leaves after the save that all ranks agreed on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from raysgd.errors import AttemptEnded
from raysgd.session.events import AtSavePoint
from raysgd.session.gates import SaveGate
from support.poll import until
from support.sessions import Worker


def started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_saves_pass_an_open_gate() -> None:
    gate = SaveGate()
    for _ in range(3):
        gate.begin()
    assert (gate.limit, gate.hold()) == (None, 3)


def test_held_rank_waits_at_its_next_save() -> None:
    gate = SaveGate()
    gate.begin()
    assert gate.hold() == 1
    thread = started(gate.begin)
    thread.join(0.05)
    assert thread.is_alive()
    gate.release(AtSavePoint(1, 1))
    thread.join(10)
    assert not thread.is_alive() and gate.limit == AtSavePoint(1, 1)


def test_rank_that_is_behind_makes_its_saves_up_to_the_last() -> None:
    gate = SaveGate()
    gate.hold()
    gate.release(AtSavePoint(2, 1))
    for _ in range(3):
        gate.begin()
    thread = started(gate.begin)  # one more than all agreed on
    thread.join(0.05)
    assert thread.is_alive()
    gate.open()
    thread.join(10)
    assert not thread.is_alive()


def test_waiting_rank_marks_progress_until_the_attempt_ends() -> None:
    gate, ticks = SaveGate(), []
    gate.release(AtSavePoint(0, 1))
    gate.begin()
    thread = started(lambda: gate.wait(lambda: ticks.append(1)))
    assert until(lambda: len(ticks) >= 1, 20)
    gate.open()
    thread.join(10)
    assert not thread.is_alive()


def test_waiting_ends_when_the_last_save_is_withdrawn() -> None:
    gate = SaveGate()
    gate.release(AtSavePoint(0, 1))
    gate.begin()
    thread = started(lambda: gate.wait(lambda: None))
    gate.release(None)
    thread.join(10)
    assert not thread.is_alive()
    gate.begin()


def test_hold_after_the_end_of_the_attempt_holds_nobody() -> None:
    gate = SaveGate()
    gate.open()
    assert gate.hold() == 0
    gate.release(AtSavePoint(0, 1))
    gate.begin()
    assert gate.limit is None


def leaving(worker: Worker) -> threading.Thread:
    """A loop in a thread of its own that reports after each save, or before, until its attempt ends."""

    def loop() -> None:
        with contextlib.suppress(AttemptEnded):
            for _ in range(10):
                worker.save()
                worker.report(loss=1.0)

    worker.session.save_gate.hold()
    thread = started(loop)
    worker.session.save_gate.release(AtSavePoint(1, 1))
    return thread


def test_loop_that_saves_first_leaves_after_the_report_of_its_save() -> None:
    worker = Worker()
    thread = leaving(worker)
    assert until(lambda: worker.session.num_reports == 2, 20)
    sent: list[object] = []
    assert until(lambda: sent.extend(worker.sent()) or AtSavePoint(1, 1) in sent, 20)  # type: ignore[func-returns-value]
    worker.session.end("the group grows")
    thread.join(20)
    assert not thread.is_alive()
    assert (worker.session.num_reports, len(worker.writer.calls)) == (2, 2)


def test_loop_that_reports_first_leaves_in_its_save() -> None:
    worker = Worker()
    worker.report(loss=1.0)
    thread = leaving(worker)
    assert until(lambda: len(worker.writer.calls) == 2, 20)
    assert until(lambda: AtSavePoint(1, 1) in worker.sent(), 20)
    worker.session.end("the group grows")
    thread.join(20)
    assert not thread.is_alive()
    assert (worker.session.num_reports, len(worker.writer.calls)) == (2, 2)


@pytest.mark.parametrize("num_saves", [0, 1])
def test_loop_that_never_reports_leaves_in_its_save(num_saves: int) -> None:
    """The first save of all may have a report to come; where the next save came instead, and later, nothing is waited for."""
    worker = Worker()
    for _ in range(num_saves):
        worker.save()

    def loop() -> None:
        with contextlib.suppress(AttemptEnded):
            for _ in range(10):
                worker.save()

    worker.session.save_gate.hold()
    thread = started(loop)
    worker.session.save_gate.release(AtSavePoint(num_saves, 1))
    sent: list[object] = []
    assert until(lambda: sent.extend(worker.sent()) or AtSavePoint(num_saves, 1) in sent, 20)  # type: ignore[func-returns-value]
    worker.session.end("the group grows")
    thread.join(20)
    assert not thread.is_alive()
    assert len(worker.writer.calls) == num_saves + 1


def test_loop_without_a_report_after_the_last_save_leaves_before_the_next() -> None:
    worker = Worker()
    worker.save()
    worker.report(loss=1.0)

    def loop() -> None:
        with contextlib.suppress(AttemptEnded):
            for _ in range(10):
                worker.save()

    worker.session.save_gate.hold()
    thread = started(loop)
    worker.session.save_gate.release(AtSavePoint(1, 1))
    assert until(lambda: AtSavePoint(1, 1) in worker.sent(), 20)
    worker.session.end("the group grows")
    thread.join(20)
    assert not thread.is_alive()
    assert len(worker.writer.calls) == 2


def test_waiting_rank_continues_when_the_last_save_is_replaced_by_a_later_one() -> None:
    worker = Worker()
    thread = leaving(worker)
    sent: list[object] = []
    assert until(lambda: sent.extend(worker.sent()) or AtSavePoint(1, 1) in sent, 20)  # type: ignore[func-returns-value]
    worker.session.save_gate.release(AtSavePoint(3, 2))
    assert until(lambda: sent.extend(worker.sent()) or AtSavePoint(3, 2) in sent, 20)  # type: ignore[func-returns-value]
    worker.session.end("the group grows")
    thread.join(20)
    assert not thread.is_alive()
    assert (worker.session.num_reports, len(worker.writer.calls)) == (4, 4)


def test_loop_continues_when_the_last_save_is_withdrawn() -> None:
    worker = Worker()
    thread = leaving(worker)
    assert until(lambda: worker.session.num_reports == 2, 20)
    worker.session.save_gate.release(None)
    thread.join(20)
    assert not thread.is_alive() and worker.session.num_reports == 10
