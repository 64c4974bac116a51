"""`RetentionPolicy`: which checkpoints are kept and which one is best."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from raysgd.checkpoint.retention import RetentionPolicy, metric_value


@dataclass(frozen=True)
class Record:
    number: int
    metrics: dict[str, Any] = field(default_factory=dict)


def records(*scores: Any) -> list[Record]:
    return [Record(number, {} if score is None else {"acc": score}) for number, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("num_to_keep", "order", "scores", "deleted"),
    [
        (None, "max", [1, 2, 3], []),
        (2, "max", [3, 1, 2], [1]),
        (2, "min", [3, 1, 2], [0]),
        (1, "max", [3, 1, 2], [1]),  # the best and the newest
        (1, "max", [1, 2, 3], [0, 1]),
        (2, "max", [math.nan, 1, 2, None, 0.5], [0, 3]),
        (2, "min", [math.nan, 1, 2, None, 0.5], [0, 2, 3]),
        (1, "max", [5, 5, 5, 0], [0, 1]),  # the newer of equal ones
        (1, "max", [None, None, None], []),  # the name may be wrong: nobody knows which is the best
        (1, "max", [None, None, 3, None], [0, 1]),
        (1, "max", ["high", "low", "low"], []),
        (1, "max", [math.nan, math.nan, math.nan], [0, 1]),
        (1, "max", [-math.inf, math.nan, None, None], [1, 2]),
        (3, "max", [1, 2], []),
        (1, "max", [], []),
        (2, "max", ["high", 1, True, 0], [0]),
    ],
)
def test_best_and_newest_are_kept(num_to_keep: int, order: str, scores: list[Any], deleted: list[int]) -> None:
    assert RetentionPolicy(num_to_keep, "acc", order).to_delete(records(*scores)) == deleted


def test_the_best_by_further_metrics_are_kept_too() -> None:
    found = [
        Record(number, {"loss": loss, "val": {"acc": acc}})
        for number, (loss, acc) in enumerate([(5, 9), (1, 2), (3, 3), (4, 4), (2, 1)])
    ]
    assert RetentionPolicy(2).to_delete(found) == [0, 1, 2]
    assert RetentionPolicy(2, keep_best={"loss": "min"}).to_delete(found) == [0, 2]
    assert RetentionPolicy(2, keep_best={"loss": "min", "val/acc": "max"}).to_delete(found) == [2]
    assert RetentionPolicy(2, keep_best={"los": "min"}).to_delete(found) == [0, 1, 2]
    assert RetentionPolicy(None, keep_best={"loss": "min"}).to_delete(found) == []


def test_without_a_metric_the_newest_are_kept() -> None:
    policy = RetentionPolicy(2)
    assert policy.to_delete(records(9, 1, 1, 1)) == [0, 1]
    best = policy.best(records(9, 1))
    assert best is not None and best.number == 1


@pytest.mark.parametrize(
    ("order", "scores", "best"),
    [
        ("max", [1, 3, 2], 1),
        ("min", [1, 3, 2], 0),
        ("max", [3, 3, 1], 1),
        ("max", [math.nan, None, -5], 2),
        ("min", [math.nan, math.inf, None], 1),
        ("max", [-math.inf, math.nan], 0),
        ("max", [None, math.nan], None),
        ("max", [], None),
    ],
)
def test_best_finds_the_best_record(order: str, scores: list[Any], best: int | None) -> None:
    found = RetentionPolicy(None, "acc", order).best(records(*scores))
    assert (None if found is None else found.number) == best


@hypothesis.given(
    scores=st.lists(st.none() | st.floats() | st.integers(-3, 3), max_size=12),
    num_to_keep=st.integers(1, 5),
    order=st.sampled_from(["max", "min"]),
)
def test_kept_checkpoints_are_not_worse_than_deleted_ones(scores: list[Any], num_to_keep: int, order: str) -> None:
    found, policy = records(*scores), RetentionPolicy(num_to_keep, "acc", order)
    deleted = policy.to_delete(found)
    kept = [record for record in found if record.number not in deleted]
    if not any("acc" in record.metrics for record in found):
        assert deleted == []
        return
    assert min(len(found), num_to_keep) <= len(kept) <= num_to_keep + 1
    if found:
        assert kept[-1] is found[-1]
        assert policy.best(kept) == policy.best(found)
    assert policy.to_delete(kept) == [] or len(kept) > num_to_keep


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"accuracy": 1.0, "loss": 2.0}, "has no metric 'acc' (did you mean 'accuracy'?); it has accuracy, loss"),
        ({"val": {"acc": 1.0}}, "has no metric 'acc' (did you mean 'val/acc'?); it has val/acc"),
        ({"acc": {"top1": 1.0}}, "has no metric 'acc' (did you mean 'acc/top1'?); it has acc/top1"),
        ({}, "has no metric 'acc'; it has no metrics"),
        ({"acc": "high"}, "has acc='high', which is not a number"),
    ],
)
def test_checkpoint_that_cannot_be_ranked_is_explained(metrics: dict[str, Any], why: str) -> None:
    policy = RetentionPolicy(1, "acc")
    assert not policy.can_rank(metrics)
    assert policy.explain_unranked(metrics) == why


def test_nan_can_be_ranked() -> None:
    assert RetentionPolicy(1, "acc").can_rank({"acc": math.nan})
    assert RetentionPolicy(1).can_rank({})


@pytest.mark.parametrize(
    ("metrics", "name", "value"),
    [
        ({"a": 1}, "a", 1.0),
        ({"a": {"b": 2}}, "a/b", 2.0),
        ({"a/b": 3, "a": {"b": 2}}, "a/b", 3.0),
        ({"a": {"b": {"c": 4}}}, "a/b/c", 4.0),
        ({"a": 10**400}, "a", math.inf),
        ({"a": -(10**400)}, "a", -math.inf),
    ],
)
def test_metrics_are_found_by_name(metrics: dict[str, Any], name: str, value: float) -> None:
    assert metric_value(metrics, name) == value


@pytest.mark.parametrize(("metrics", "name"), [({}, "a"), ({"a": 1}, "a/b"), ({"a": "1"}, "a"), ({"a": None}, "a")])
def test_metrics_that_are_not_numbers_are_nan(metrics: dict[str, Any], name: str) -> None:
    assert math.isnan(metric_value(metrics, name))
