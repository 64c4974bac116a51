"""The ledger of a run's time: each second of each worker has one use, whatever happens to the run."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.goodput.ledger import WORDS, Ledger, goodput_of
from raysgd.result import Event
from support.run_events import RunEvents as Run

SECONDS = st.floats(0.01, 50.0)
USES = ("training", "data", "waiting", "checkpoint", "compiling", "evaluation", "callbacks", "garbage")


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Event], list[tuple[float, float, int]]]:
    """Return the events of a run, and when how many workers were held: (start, end, workers)."""
    run, held = Run(), []
    num_attempts = draw(st.integers(0, 4))
    began, size = run.at, 1
    for number in range(num_attempts):
        size = draw(st.integers(1, 3))
        run.start(size, draw(SECONDS))
        _train(draw, run, size)
        if number == num_attempts - 1 and draw(st.booleans()):
            break  # it is live
        run.at += draw(SECONDS)
        run.kept_s = draw(st.floats(0, run.kept_s + 60))
        kind = draw(st.sampled_from(["failure", "regroup", "paused", "controller_restart", "run_end"]))
        run.emit(kind)
        held.append((began, run.at, size))
        began = run.at
        if kind == "paused":
            run.at += draw(SECONDS)
            run.emit("resumed")
            held.append((began, run.at, size))
            began = run.at
        if kind == "run_end":
            break
    return run.events, [*held, (began, run.events[-1].timestamp, size)]


def _train(draw: st.DrawFn, run: Run, size: int) -> None:
    """Let some ranks enter train_func, use their time somehow, and leave."""
    entered: dict[int, tuple[float, defaultdict[str, float]]] = {}
    for rank in range(size):
        if draw(st.integers(0, 5)):
            run.at += draw(st.floats(0, 0.5))
            run.enter(rank)
            entered[rank] = (run.at, defaultdict(float))
    for _ in range(draw(st.integers(0, 3))):
        run.at += draw(SECONDS)
        for rank, (since, uses) in entered.items():
            left_s = run.at - since - sum(uses.values())
            for use in draw(st.lists(st.sampled_from(USES), min_size=1, max_size=3, unique=True)):
                part = draw(st.floats(0, 1)) * left_s
                uses[use] += part
                left_s -= part
            uses["training"] += left_s
            run.sample(rank, 10, **uses)
    for rank, (since, uses) in entered.items():
        if draw(st.booleans()):
            run.at += draw(st.floats(0, 0.2))
            uses["training"] += run.at - since - sum(uses.values())
            run.leave(rank, **uses)


@given(runs())
def test_each_second_of_each_worker_has_exactly_one_use(
    run: tuple[list[Event], list[tuple[float, float, int]]],
) -> None:
    events, held = run
    ledger = Ledger.of(events)
    slices = list(ledger.slices())
    assert sum(ledger.totals().values()) == pytest.approx(
        sum((end - start) * size for start, end, size in held), abs=1e-6
    )
    for each in slices:
        assert sum(each.uses.values()) == pytest.approx(each.end - each.start, abs=1e-6)
        assert min(each.uses.values()) >= 0 and set(each.uses) <= set(WORDS)
    for rank in {each.rank for each in slices}:
        own = sorted((each for each in slices if each.rank == rank), key=lambda each: each.start)
        for before, after in pairwise(own):
            assert after.start >= before.end - 1e-6, "two uses at the same time"
    if slices and (goodput := ledger.goodput()) is not None:
        assert 0 <= goodput <= 1 + 1e-9


@given(runs(), st.integers(2, 8))
def test_samples_that_are_left_out_change_no_sum(run: tuple[list[Event], Any], half: int) -> None:
    every, few = Ledger.of(run[0]), Ledger(max_readings=2)
    for event in run[0]:
        few.add(event)
    assert sum(few.totals().values()) == pytest.approx(sum(every.totals().values()), abs=1e-6)


def test_steps_after_the_checkpoint_that_a_failure_undid_are_repeated() -> None:
    run = Run()
    run.start(2)
    for rank in (0, 1):
        run.enter(rank)
    run.at += 10
    run.leave(0, setup=1.0, training=8.0, waiting=1.0)  # it waited for rank 1, which had died
    run.at += 0.5
    run.kept_s = 7.0
    run.emit("failure")
    run.start(2, joining_s=2.5)
    for rank in (0, 1):
        run.enter(rank)
    run.at += 5
    for rank in (0, 1):
        run.leave(rank, setup=1.0, training=4.0)
    run.emit("run_end")
    of_rank_0 = Ledger.of(run.events).by_rank()[0]
    # Three seconds of ten came after the checkpoint; what they were used for is known as a whole.
    assert of_rank_0 == pytest.approx(
        {
            "starting": 1,
            "setup": 0.7 + 1,
            "training": 0.7 * 8 + 4,
            "skew": 0.7,
            "repeated": 0.3 * 9,
            "recovering": 0.3 * 1 + 0.5 + 2.5,
        }
    )


def test_a_pause_costs_no_goodput() -> None:
    run = Run()
    run.start(1, joining_s=0.0)
    run.enter(0)
    run.at += 10
    run.leave(0, training=10.0)
    run.emit("paused")
    run.at += 3600
    run.emit("resumed")
    run.kept_s = 10.0
    run.start(1, joining_s=0.0)
    run.enter(0)
    run.at += 10
    run.leave(0, training=5.0, data=5.0)
    run.emit("run_end")
    ledger = Ledger.of(run.events)
    assert ledger.totals()["paused"] == 3600
    assert ledger.goodput() == 0.75


def test_a_run_without_a_worker_has_no_goodput_yet() -> None:
    assert Ledger.of(Run().events).goodput() is None
    assert goodput_of({}) is None


# -- waiting: for late ranks, and exchanging -----------------------------------------------------------------------------


def waiting(*of_ranks: list[float], every_s: float = 10.0) -> dict[int, dict[str, float]]:
    """Return the uses of ranks that had waited so long in all at each sample; the rest of the time is training."""
    run = Run()
    run.start(len(of_ranks), joining_s=0.0)
    for rank in range(len(of_ranks)):
        run.enter(rank)
    for number, waits in enumerate(zip(*of_ranks, strict=True), 1):
        run.at = 1000.0 + number * every_s
        for rank, waited_s in enumerate(waits):
            run.sample(rank, number * 10, training=number * every_s - waited_s, waiting=waited_s)
    return Ledger.of(run.events).by_rank()


def test_the_least_that_a_rank_waits_is_exchanging() -> None:
    uses = waiting([1.0, 2.0, 3.0], [4.0, 8.0, 12.0])
    assert uses[0] == pytest.approx({"training": 27, "transfer": 3})
    assert uses[1] == pytest.approx({"training": 18, "transfer": 3, "skew": 9})


def test_ranks_that_are_late_at_different_times_are_waited_for() -> None:
    uses = waiting([0.0, 5.0], [5.0, 5.0])
    assert all(uses[rank] == pytest.approx({"training": 15, "skew": 5}) for rank in (0, 1))


@given(st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=6))
def test_all_ranks_exchange_equally_long_and_wait_for_late_ranks_otherwise(
    waits: list[list[float]],
) -> None:
    so_far = [[sum(each[rank] for each in waits[: number + 1]) for number in range(len(waits))] for rank in range(3)]
    for rank, uses in waiting(*so_far).items():
        assert uses.get("transfer", 0.0) == pytest.approx(sum(map(min, waits)), abs=1e-6)
        assert uses.get("transfer", 0.0) + uses.get("skew", 0.0) == pytest.approx(so_far[rank][-1], abs=1e-6)


def test_waiting_for_a_rank_that_has_not_entered_is_for_a_late_rank() -> None:
    run = Run()
    run.start(2, joining_s=0.0)
    run.enter(0)
    run.at += 10
    run.sample(0, 0, setup=1.0, waiting=9.0)
    run.enter(1)
    run.at += 10
    for rank, waited_s in ((0, 10.0), (1, 1.0)):
        run.sample(rank, 10, setup=1.0, training=9.0, waiting=waited_s)
    uses = Ledger.of(run.events).by_rank()
    assert uses[0]["skew"] == pytest.approx(9)
    assert uses[0]["transfer"] == pytest.approx(uses[1]["transfer"]) == pytest.approx(1)
