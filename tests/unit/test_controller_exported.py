"""What a run's metrics for Prometheus are made of: the uses of its workers' time, and the causes of restarts."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.controller.run.exported import RunMetrics
from raysgd.goodput.ledger import WORDS, Ledger
from raysgd.result import Event


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


@pytest.fixture(autouse=True)
def _metrics_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.metrics.Counter", Exported)
    monkeypatch.setattr("ray.util.metrics.Gauge", Exported)


def observed(*given: tuple[float, str, dict[str, Any]], iteration: int = 0) -> tuple[RunMetrics, Ledger]:
    """Give events to the metrics of a run: seconds after the one before, kind and data. Return also the ledger of all of them."""
    metrics, ledger, now = RunMetrics("exp/run_001"), Ledger(), 100.0
    for after_s, kind, data in given:
        now += after_s
        metrics.observe(Event(kind, now, data), iteration)
        ledger.add(Event(kind, now, data))
    metrics.export(ledger.totals())
    return metrics, ledger


def start(attempt: int = 1, after_s: float = 0.0, **data: Any) -> list[tuple[float, str, dict[str, Any]]]:
    begin = {"attempt": attempt, "world_size": 1, "iterations_before": 0, **data}
    return [(after_s, "attempt_start", begin), (0, "entered", {"rank": 0, "attempt": attempt})]


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
def test_restarts_are_counted_by_cause(events: list[tuple[str, dict[str, Any]]], cause: str) -> None:
    metrics, _ = observed(*start(), *((1, *event) for event in events), *start(2), (1, "run_end", {"kind": "done"}))
    assert metrics._exported["restarts"].values == {("exp/run_001", cause): 1}


def test_uses_of_the_time_are_those_of_the_ledger_and_none_is_missing() -> None:
    first = [*start(after_s=2), (10, "sample", {"rank": 0, "steps": 5, "uses": {"setup": 2.0, "training": 8.0}})]
    metrics, ledger = observed((0, "run_start", {}), *first)
    seconds, goodput = metrics._exported["worker_seconds"], metrics._exported["goodput_ratio"]
    assert seconds.values == {("exp/run_001", use): ledger.totals().get(use, 0.0) for use in WORDS}
    assert seconds.values["exp/run_001", "training"] == pytest.approx(8)
    assert goodput.values == {("exp/run_001",): ledger.goodput()} == {("exp/run_001",): pytest.approx(8 / 12)}
    metrics, ledger = observed((0, "run_start", {}), *first, (0, "failure", {"cause": "death"}), *start(2, after_s=4))
    seconds = metrics._exported["worker_seconds"]
    assert seconds.values["exp/run_001", "training"] == 0, "a failure has made it repeated steps"
    assert seconds.values["exp/run_001", "repeated"] == pytest.approx(10)
    assert sum(seconds.values.values()) == pytest.approx(16)


def test_rounds_that_are_repeated_count_again() -> None:
    metrics, _ = observed(*start(), (1, "sample", {"rank": 0}), iteration=7)
    metrics.observe(Event("attempt_start", 200.0, {"attempt": 2, "world_size": 1, "iterations_before": 5}), 5)
    metrics.observe(Event("sample", 201.0, {"rank": 0}), 9)
    metrics.export({})
    assert metrics._exported["rounds"].values == {("exp/run_001",): 7 + 4}
