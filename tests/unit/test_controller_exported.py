"""What a run's metrics for Prometheus are made of: goodput, and the causes of restarts."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.controller.commands import RecordEvent
from raysgd.controller.run.exported import RunMetrics
from raysgd.controller.run.goodput import Goodput


class Timed:
    """A goodput and its clock. Each event comes some seconds after the one before."""

    def __init__(self) -> None:
        self.now = 100.0
        self.last_round = 0
        self.goodput = Goodput(self.now)

    def event(self, after_s: float, kind: str, /, **data: Any) -> None:
        self.now += after_s
        self.goodput.observe(kind, data, self.last_round, self.now)

    def train(self, seconds: float, last_round: int) -> None:
        self.last_round = last_round
        self.event(seconds, "sample")

    def start(self, after_s: float, round_before: int, world_size: int = 2) -> None:
        """All ranks enter train_func, the last one ``after_s`` from now."""
        self.last_round = round_before
        self.event(0, "attempt_start", attempt=1, world_size=world_size, iterations_before=round_before)
        for rank in range(world_size):
            self.event(after_s if rank == world_size - 1 else 0, "entered", rank=rank)

    @property
    def fraction(self) -> float:
        return self.goodput.fraction(self.now)


def test_start_is_no_progress_and_training_is() -> None:
    run = Timed()
    assert run.fraction == 0
    run.start(5, 0)
    assert run.fraction == 0
    run.train(15, last_round=10)
    assert run.fraction == pytest.approx(15 / 20)
    run.event(0, "run_end", kind="done")
    run.now += 100  # nobody asks for it any more, but it would not be progress
    assert run.fraction == pytest.approx(15 / 120)


def test_failure_takes_off_what_is_trained_again() -> None:
    run = Timed()
    run.start(0, 0)
    run.train(10, last_round=10)
    run.train(10, last_round=20)
    run.event(4, "failure", cause="death")  # 4 s in which nothing was complete
    run.start(6, 15)  # from a checkpoint of round 15: half of the second 10 s is lost
    assert run.fraction == pytest.approx(15 / 30)
    run.train(10, last_round=25)
    assert run.fraction == pytest.approx(25 / 40)


def test_rounds_are_dropped_once_by_failures_one_after_the_other() -> None:
    run = Timed()
    run.start(0, 0)
    run.train(10, last_round=10)
    for _ in range(2):
        run.event(0, "failure", cause="death")
        run.start(0, 5)
    assert run.fraction == pytest.approx(0.5)


def test_training_without_rounds_loses_all_by_a_failure() -> None:
    run = Timed()
    run.start(0, 0)
    run.train(10, last_round=0)
    assert run.fraction == 1
    run.event(0, "failure", cause="death")
    run.start(0, 0)
    assert run.fraction == 0


def test_pause_is_not_part_of_the_time() -> None:
    run = Timed()
    run.start(0, 0)
    run.train(10, last_round=10)
    run.event(0, "regroup", cause="pause")
    run.event(0, "paused")
    run.now += 1000
    assert run.fraction == 1
    run.event(0, "resumed")
    run.start(10, 10)
    assert run.fraction == pytest.approx(0.5)


@pytest.mark.parametrize(("how", "kept"), [("done", 1), ("stopped", 1), ("cancelled", 0.4), ("error", 0.4)])
def test_run_that_fails_has_kept_its_checkpoint(how: str, kept: float) -> None:
    run = Timed()
    run.start(0, 0)
    run.train(10, last_round=10)
    run.event(0, "checkpoint", iteration=4)
    run.event(0, "run_end", kind=how)
    assert run.fraction == pytest.approx(kept)


def test_resumed_run_begins_with_the_rounds_of_its_checkpoint() -> None:
    run = Timed()
    run.start(10, 100)
    run.train(10, last_round=110)
    assert run.fraction == pytest.approx(0.5)
    run.event(0, "failure", cause="death")
    run.start(0, 105)
    assert run.fraction == pytest.approx(5 / 20)


def test_long_run_has_few_marks() -> None:
    run = Timed()
    run.start(0, 0)
    for number in range(1, 20_001):
        run.train(1, number)
    assert len(run.goodput._marks) <= 4097
    run.event(0, "failure", cause="death")
    run.start(0, 15_000)
    assert run.fraction == pytest.approx(0.75)


class Exported:
    """Takes the place of a metric of Ray, and keeps what was added for each set of labels."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self._keys = tag_keys

    def inc(self, amount: float, tags: dict[str, str]) -> None:
        assert set(tags) <= set(self._keys)
        labels = tuple(tags.values())
        self.values[labels] = self.values.get(labels, 0) + amount

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) <= set(self._keys)
        self.values[tuple(tags.values())] = value


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([("failure", {"cause": "death"})], "death"),
        ([("failure", {"cause": "exception"})], "exception"),
        ([("hang", {"rank": 1}), ("failure", {"cause": "death"})], "hang"),
        ([("regroup", {"cause": "resize"})], "resize"),
        ([("preemption", {"rank": 0}), ("regroup", {"cause": "preemption"})], "preemption"),
        ([("regroup", {"cause": "checkpoint"})], "checkpoint"),
        ([("regroup", {"cause": "pause"}), ("paused", {}), ("resumed", {})], "pause"),
    ],
)
def test_restarts_are_counted_by_cause(
    events: list[tuple[str, dict[str, Any]]], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.metrics.Counter", Exported)
    monkeypatch.setattr("ray.util.metrics.Gauge", Exported)
    metrics = RunMetrics("exp/run_001", clock=iter(range(1000)).__next__)
    start = ("attempt_start", {"attempt": 1, "world_size": 1, "iterations_before": 0})
    again = ("attempt_start", {"attempt": 2, "world_size": 1, "iterations_before": 0})
    entered = ("entered", {"rank": 0})
    for kind, data in [start, entered, *events, again, entered, ("sample", {})]:
        metrics.observe(RecordEvent(kind, data), iteration=0)
    assert metrics._exported is not None
    assert metrics._exported["restarts"].values == {("exp/run_001", cause): 1}
    (goodput,) = metrics._exported["goodput_fraction"].values.values()
    assert 0 < goodput < 1
