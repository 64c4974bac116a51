"""The ledger of a run's time: each second of each worker has one use, whatever happens to the run. And the rules of `why`."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.goodput.evidence import Evidence
from raysgd.goodput.findings import Finding, find_causes
from raysgd.goodput.ledger import WORDS, Ledger, goodput_of
from raysgd.goodput.rules import RULES
from raysgd.result import Event

SECONDS = st.floats(0.01, 50.0)
USES = ("training", "data", "waiting", "checkpoint", "compiling", "evaluation", "callbacks", "garbage")


class Run:
    """Makes the events of a run, as the controller writes them."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.events: list[Event] = []
        self.attempt = 0
        self.kept_s = 0.0  # of training, at the newest checkpoint
        self.emit("run_start")

    def emit(self, kind: str, **data: Any) -> None:
        self.events.append(Event(kind, self.at, data))

    def start(self, size: int, joining_s: float = 1.0) -> None:
        self.at += joining_s
        self.attempt += 1
        for rank in range(size):
            self.emit("worker_up", rank=rank, node=f"node{rank}")
        self.emit("attempt_start", attempt=self.attempt, world_size=size, time_before_s=self.kept_s)

    def enter(self, rank: int) -> None:
        self.emit("entered", rank=rank, attempt=self.attempt, timestamp=self.at)

    def sample(self, rank: int, steps: int, **uses: float) -> None:
        self.emit("sample", rank=rank, steps=steps, uses=uses, cpu_wait_s=0.0)

    def leave(self, rank: int, **uses: float) -> None:
        self.emit("left", rank=rank, attempt=self.attempt, uses=uses)


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
            "waiting": 0.7,
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


# -- rules -------------------------------------------------------------------------------------------------------------


def stepping(size: int, **uses_of: dict[str, float]) -> list[Finding]:
    """Find the causes in a run whose steps take these seconds; ``rank1={...}`` differs from ``each={...}``."""
    run = Run()
    run.start(size, joining_s=0.0)
    for rank in range(size):
        run.enter(rank)
    for steps in (10, 110):
        for rank in range(size):
            uses = {**uses_of["each"], **uses_of.get(f"rank{rank}", {})}
            run.at = 1000.0 + steps * sum(uses.values())
            run.sample(rank, steps, **{use: seconds * steps for use, seconds in uses.items()})
    run.emit("run_end")
    return find_causes(Evidence.of(run.events), RULES)


def test_a_healthy_run_has_no_cause() -> None:
    assert stepping(4, each={"training": 0.1, "waiting": 0.002, "data": 0.002, "checkpoint": 0.001}) == []


def test_all_ranks_wait_for_data() -> None:
    found = stepping(2, each={"training": 0.06, "data": 0.04})
    assert [each.cause for each in found] == ["data"]
    assert found[0].share == pytest.approx(0.4, abs=0.01)
    assert found[0].gain == pytest.approx(1 / 0.6, rel=0.02), "reading and computing at the same time"


def test_one_rank_waits_for_data() -> None:
    found = stepping(4, each={"training": 0.06, "data": 0.002, "waiting": 0.038}, rank3={"data": 0.04, "waiting": 0.0})
    assert [each.cause for each in found] == ["data"]
    assert "rank 3 on node3 waits 40% of its steps for batches, the others 2%." in found[0].text


def test_one_rank_computes_longer() -> None:
    found = stepping(4, each={"training": 0.06, "waiting": 0.04}, rank2={"training": 0.1, "waiting": 0.0})
    assert [each.cause for each in found] == ["straggler"]
    assert "rank 2 on node2 computes 1.67x as long as the others" in found[0].text
    assert found[0].gain == pytest.approx(1 / 0.6, rel=0.02)


@pytest.mark.parametrize(
    ("use", "cause"),
    [("compiling", "compiling"), ("callbacks", "callbacks"), ("garbage", "garbage collection")],
)
def test_overheads_are_named(use: str, cause: str) -> None:
    assert [each.cause for each in stepping(2, each={"training": 0.08, use: 0.02})] == [cause]


def test_a_first_compilation_belongs_to_the_start() -> None:
    run = Run()
    run.start(1, joining_s=1.0)
    run.enter(0)
    run.at += 10
    run.emit("left", rank=0, attempt=1, steps=50, uses={"setup": 1.0, "compiling": 4.0, "training": 5.0})
    run.emit("run_end")
    (found,) = find_causes(Evidence.of(run.events), RULES)
    assert found.cause == "start" and found.share == pytest.approx(6 / 11)


def test_waiting_for_the_script_is_no_cause() -> None:
    assert stepping(2, each={"training": 0.02, "script": 0.08}) == []


def test_gain_without_an_overhead_is_that_of_a_step() -> None:
    (found,) = stepping(2, each={"training": 0.02, "script": 0.06, "callbacks": 0.02})
    assert (found.cause, found.share) == ("callbacks", pytest.approx(0.2, abs=0.01))
    assert found.gain == pytest.approx(2)


def test_exchanging_that_takes_long_is_no_straggler() -> None:
    assert [each.cause for each in stepping(4, each={"training": 0.02, "waiting": 0.03})] == ["collectives"]


def crowded(**readings: list[float]) -> list[Finding]:
    """Find the causes in a run of two ranks with these seconds so far at two samples, 10 s apart; a list of each rank's."""
    run = Run()
    run.start(2, joining_s=0.0)
    for rank in (0, 1):
        run.enter(rank)
    for number, steps in enumerate((10, 110)):
        run.at = 1000.0 + 0.1 * steps
        for rank in (0, 1):
            own = {name: number * values[rank] for name, values in readings.items()}
            busy = {"name": "burner", "pid": 4711, "processors": 1.5}
            run.emit("sample", rank=rank, steps=steps, uses={"training": 0.1 * steps}, busy=busy, **own)
    run.emit("run_end")
    return find_causes(Evidence.of(run.events), RULES)


def test_processors_that_all_ranks_wait_for() -> None:
    (found,) = crowded(cpu_wait_s=[3.0, 2.0])
    assert found.cause == "processors" and found.gain == pytest.approx(1.25)
    assert "20% of the time; most used by burner (pid 4711, 1.5 processors)" in found.text


def test_memory_that_a_node_waits_for() -> None:
    (found,) = crowded(memory_wait_s=[0.0, 4.0])
    assert found.cause == "memory" and "the node of rank 1, node1, waited 40%" in found.text
