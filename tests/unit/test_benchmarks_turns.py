"""Systems that are measured at once, one of them working at a time."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench.measures import load_measure
from bench.program import at_once, make_turns
from bench.turn_lock import TurnLock, Turns


def test_systems_work_one_at_a_time_and_once_in_each_round() -> None:
    working = threading.Semaphore()
    done: list[str] = []

    def work(name: str, address: str) -> None:
        with Turns(address) as turns:
            for _ in range(20):
                with turns.one():
                    assert working.acquire(blocking=False), "another one is working"
                    done.append(name)
                    working.release()

    with TurnLock(3) as turn_lock, ThreadPoolExecutor(3) as pool:
        list(pool.map(work, "abc", [turn_lock.address] * 3))
    rounds = [set(done[start : start + 3]) for start in range(0, 60, 3)]
    assert rounds == [{"a", "b", "c"}] * 20
    assert len({tuple(done[start : start + 3]) for start in range(0, 60, 3)}) > 1, "always in the same order"


def test_turns_continue_when_a_system_ends_before_or_in_its_turn() -> None:
    def fail(address: str) -> None:
        with Turns(address) as turns, turns.one():
            raise ArithmeticError

    def work(address: str) -> int:
        with Turns(address) as turns:
            for _ in range(5):
                with turns.one():
                    pass
        return 5

    with TurnLock(3) as turn_lock, ThreadPoolExecutor(2) as pool:
        failing, working = pool.submit(fail, turn_lock.address), pool.submit(work, turn_lock.address)
        turn_lock.ended()
        assert working.result(10) == 5
        with pytest.raises(ArithmeticError):
            failing.result(10)


def test_turns_without_a_lock_are_immediate() -> None:
    with Turns(None) as turns, turns.one():
        pass


def test_unused_turn_lock_closes() -> None:
    with TurnLock(2):
        pass


def test_systems_with_the_same_framework_are_measured_at_once() -> None:
    measures = {name: load_measure(name) for name in ("backend_start", "backend_allreduce")}
    batches = at_once(make_turns(list(measures.values()), quick=False), measures)
    starts = [batch for batch in batches if batch[0].measures == ("backend_start",)]
    sums = [batch for batch in batches if batch[0].measures == ("backend_allreduce",)]
    assert {len(batch) for batch in starts} == {1}
    assert {turn.system for turn in sums[0]} == {"bare", "torchrun", "raysgd_torch"}
    assert {len({turn.repetition for turn in batch}) for batch in sums} == {1}
    assert len(sums) == 4 * measures["backend_allreduce"].repeat
