"""Systems that are measured at once, one of them working at a time."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench.baton import Baton, Turns
from bench.measures import load_measure
from bench.schedule import at_once, make_turns


def test_one_works_at_a_time_and_each_in_every_round() -> None:
    working = threading.Semaphore()
    done: list[str] = []

    def work(name: str, address: str) -> None:
        with Turns(address) as turns:
            for _ in range(20):
                with turns.one():
                    assert working.acquire(blocking=False), "another one is working"
                    done.append(name)
                    working.release()

    with Baton(3) as baton, ThreadPoolExecutor(3) as pool:
        list(pool.map(work, "abc", [baton.address] * 3))
    rounds = [set(done[start : start + 3]) for start in range(0, 60, 3)]
    assert rounds == [{"a", "b", "c"}] * 20
    assert len({tuple(done[start : start + 3]) for start in range(0, 60, 3)}) > 1, "always in the same order"


def test_the_others_go_on_without_one_that_ends_before_its_turn_or_in_it() -> None:
    def fail(address: str) -> None:
        with Turns(address) as turns, turns.one():
            raise ArithmeticError

    def work(address: str) -> int:
        with Turns(address) as turns:
            for _ in range(5):
                with turns.one():
                    pass
        return 5

    with Baton(3) as baton, ThreadPoolExecutor(2) as pool:
        failing, working = pool.submit(fail, baton.address), pool.submit(work, baton.address)
        baton.ended()
        assert working.result(10) == 5
        with pytest.raises(ArithmeticError):
            failing.result(10)


def test_who_has_no_address_has_every_turn() -> None:
    with Turns(None) as turns, turns.one():
        pass


def test_a_baton_that_nobody_asks_can_be_put_down() -> None:
    with Baton(2):
        pass


def test_systems_with_the_same_framework_are_measured_at_once() -> None:
    measures = {name: load_measure(name) for name in ("backend_start", "backend_allreduce")}
    batches = at_once(make_turns(list(measures.values()), quick=False), measures)
    starts = [batch for batch in batches if batch[0].measures == ("backend_start",)]
    sums = [batch for batch in batches if batch[0].measures == ("backend_allreduce",)]
    assert {len(batch) for batch in starts} == {1}
    assert {turn.system for turn in sums[0]} == {"bare", "torchrun", "raysgd_torch"}
    assert {len({turn.repetition for turn in batch}) for batch in sums} == {1}
    assert len(sums) == 4 * measures["backend_allreduce"].REPEAT
