"""Where train_func is on a rank: in which line, for how long, and in which collectives."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from raysgd.backends.flight_recorder import Collective, FlightRecord
from raysgd.workers.process.position_finder import PositionFinder
from raysgd.workers.process.train_thread import Place, TrainThread
from support.poll import until
from support.sessions import Worker

PATIENCE_S = 30
PENDING = Collective("default_pg", 5, "gloo:all_reduce", ((3,),), is_done=False, began_ns=time.time_ns() - 10**10)


EARLIER = (replace(PENDING, number=4), replace(PENDING, group="default_pg from rank 0 to rank 1", transfer="send"))


class FakeThread:
    def __init__(self) -> None:
        self.at = Place("train.py:20 in train", spot=1, cpu_s=2.0)

    def place(self) -> Place:
        return self.at


class FakeBackend:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"default_pg": 5, "rows (1)": 7}
        self.num_dumped = 0

    def count_collectives(self) -> Mapping[str, int]:
        return dict(self.numbers)

    def dump_flight_record(self) -> FlightRecord:
        self.num_dumped += 1
        return FlightRecord((PENDING,), b"", (*EARLIER, PENDING))


class Rank:
    """A rank whose thread and backend are fakes, at a given time."""

    def __init__(self, *, has_gpu: bool = False) -> None:
        self.now = 100.0
        self.thread, self.backend, self.worker = FakeThread(), FakeBackend(), Worker()
        self.finder = PositionFinder(
            self.thread,
            self.backend,  # type: ignore[arg-type]
            self.worker.session,
            has_gpu=has_gpu,
            clock=lambda: self.now,
        )

    def look_after(self, seconds: float, *, cpu_s: float = 0.0, spot: int = 1) -> Any:
        self.now += seconds
        self.thread.at = Place("train.py:20 in train", spot, self.thread.at.cpu_s + cpu_s)
        return self.finder.find()


def test_thread_that_stays_in_a_call_without_computing_is_blocked() -> None:
    rank = Rank()
    assert rank.look_after(0).blocked_s == 0
    position = rank.look_after(5)
    assert (position.blocked_s, position.line) == (5, "train.py:20 in train")
    assert position.collectives[0] is PENDING and position.waited_s >= 10
    assert rank.look_after(5).blocked_s == 10


def test_numbers_count_only_where_the_record_is_not_read() -> None:
    """The numbers of gloo's groups count sends and receives, which the record does not have."""
    rank = Rank()
    assert [(one.group, one.number) for one in rank.look_after(0).collectives] == [("default_pg", 5), ("rows (1)", 7)]
    rank.backend.numbers["default_pg"] = 9
    rank.look_after(0)
    assert list(rank.look_after(5).collectives) == [PENDING]


def test_collectives_of_a_rank_that_has_returned_are_those_of_the_record() -> None:
    rank = Rank()
    rank.backend.numbers["default_pg"] = 9
    rank.thread.at = Place()
    assert list(rank.finder.find().collectives) == [PENDING]


def test_blocked_rank_answers_whether_it_has_begun_what_others_wait_in() -> None:
    rank = Rank()
    asked = [("default_pg", 4), ("default_pg", 9), (EARLIER[1].group, 5), (EARLIER[1].group, 6)]
    assert rank.finder.find(asked).begun is None, "the record of a rank that may compute is not read"
    rank.now += 5
    assert rank.finder.find(asked).begun == EARLIER
    assert rank.finder.find(asked[1::2]).begun == ()


@pytest.mark.parametrize("change", ["cpu", "spot", "collective"])
def test_thread_that_computes_is_not_blocked_and_not_delayed_by_reading_the_record(change: str) -> None:
    rank = Rank()
    for step in range(5):
        if change == "collective":
            rank.backend.numbers["default_pg"] = step
        position = rank.look_after(5, cpu_s=2.0 * (change == "cpu"), spot=step + 1 if change == "spot" else 1)
        assert (position.blocked_s, position.waited_s) == (0, 0)
        assert [(one.group, one.number) for one in position.collectives] == list(rank.backend.numbers.items())
    assert rank.backend.num_dumped == 0


def test_thread_with_a_gpu_may_wait_by_using_its_cpu() -> None:
    rank = Rank(has_gpu=True)
    rank.look_after(0)
    assert rank.look_after(5, cpu_s=5.0).blocked_s == 5


def test_barrier_of_raysgd_is_a_collective() -> None:
    rank = Rank()
    rank.backend.numbers.clear()
    rank.worker.session.barrier()
    (passed,) = rank.look_after(0).collectives
    assert (passed.group, passed.number, passed.is_done) == ("raysgd.barrier()", 1, True)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.worker.link, "join_barrier", lambda *call: seen.append(rank.look_after(1)) or b"")
        rank.worker.session.barrier()
    (waits,) = [one for one in seen[0].collectives if one.group == "raysgd.barrier()"]
    assert (waits.number, waits.is_done, waits.place) == (2, False, "call 2 of raysgd.barrier()")
    assert all(one.is_done for one in rank.look_after(1, spot=2).collectives)


def wait_for(event: threading.Event) -> None:
    event.wait(PATIENCE_S)


def test_place_is_the_users_innermost_line_and_the_threads_cpu_time() -> None:
    may_end, ended = threading.Event(), queue.Queue[Any]()
    thread = TrainThread(lambda: ended.put(thread.call(lambda: wait_for(may_end), {}, lambda: None)))
    assert thread.place() == Place()
    thread.start()

    def is_blocked() -> bool:  # a thread that enters its call still uses some microseconds
        before = thread.place()
        time.sleep(0.01)
        return "wait_for" in before.line and thread.place() == before

    try:
        assert until(is_blocked, PATIENCE_S)
        place = thread.place()
        assert place.line.startswith("test_workers_position.py:") and place.line.endswith("in wait_for")
        assert place.spot != 0
    finally:
        may_end.set()
    ended.get(timeout=PATIENCE_S)
    assert thread.place() == Place()


def test_cpu_time_of_a_thread_that_computes_grows() -> None:
    may_end = threading.Event()

    def compute() -> None:
        while not may_end.is_set():
            pass

    thread = TrainThread(lambda: thread.call(compute, {}, lambda: None))
    thread.start()
    try:
        assert until(lambda: thread.place().cpu_s > 0.05, PATIENCE_S)
    finally:
        may_end.set()
