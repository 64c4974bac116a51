"""When early stopping ends a run, and when it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import EarlyStoppingCallback
from raysgd.callbacks.runner import CallbackRunner
from raysgd.errors import ConfigError, MetricError, MissingMetricError
from raysgd.result import Event
from raysgd.testing.callback_suite import make_info, make_result


def stopped_at(callback: EarlyStoppingCallback, values: Sequence[Any], metric: str = "loss") -> int | None:
    """The iteration at which a run with these values is ended; None: it is not."""
    problems: list[str] = []
    runner = CallbackRunner([callback], problems.append)
    runner.start(make_info(Path("run")))
    for iteration, value in enumerate(values, start=1):
        if runner.call("on_result", make_result(iteration, **{metric: value})) is not None:
            return iteration
    assert not problems
    return None


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"patience": 2}, [3, 2, 1, 1, 1], 5),
        ({"patience": 2}, [3, 2, 2, 1, 1, 0], None),
        ({"patience": 1}, [1, 2], 2),
        ({"patience": 2, "mode": "max"}, [1, 2, 3, 2, 3], 5),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.8, 2.6, 2.0], 3),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.0, 1.0, 0.4], None),
        ({"patience": 2}, [math.inf, math.inf], 2),
        ({"patience": 2}, [-math.inf, 3, 2, 1], None),
        ({"patience": 2, "nan_is_failure": False}, [1.0, math.nan, math.nan], 3),
    ],
)
def test_run_ends_after_patience_results_without_improvement(
    settings: dict[str, Any], values: list[float], expected: int | None
) -> None:
    assert stopped_at(EarlyStoppingCallback("loss", **settings), values) == expected


def test_reason_names_the_best_value_and_its_iteration() -> None:
    callback = EarlyStoppingCallback("val/acc", mode="max", patience=2)
    runner = CallbackRunner([callback], print)
    runner.start(make_info(Path("run")))
    stops = [
        runner.call("on_result", make_result(i, val={"acc": acc}))
        for i, acc in enumerate([0.5, 0.9, 0.8, 0.7], start=1)
    ]
    assert stops[:3] == [None] * 3
    assert stops[3] is not None
    reason = "val/acc has not improved for 2 results; its best was 0.9 at iteration 2, now 4."
    assert stops[3].reason == reason


def test_stop_is_raised_once() -> None:
    runner = CallbackRunner([EarlyStoppingCallback("loss", patience=2)], print)
    runner.start(make_info(Path("run")))
    stops = [runner.call("on_result", make_result(iteration, loss=1.0)) for iteration in range(1, 10)]
    assert [iteration for iteration, stop in enumerate(stops, start=1) if stop is not None] == [3]


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ([1.0, 1.1, 1.2], [1.3, 1.4], 4),
        ([1.0, 1.1, 1.2], [0.9, 1.4, 1.5, 1.6], 7),
        ([1.0, 1.1, 1.2, 1.3], [1.4, 1.5], 5),  # it has stopped before
        ([1.0, math.nan, "text"], [1.3, 1.4], 5),
        ([], [1.0, 1.1, 1.2, 1.3], 4),
    ],
)
def test_results_before_the_checkpoint_count(earlier: list[Any], later: list[float], expected: int) -> None:
    runner = CallbackRunner([EarlyStoppingCallback("loss", patience=3)], print)
    results = [make_result(iteration, loss=loss) for iteration, loss in enumerate(earlier, start=1)]
    runner.start(replace(make_info(Path("run")), read_earlier=lambda: results))
    numbered = enumerate(later, start=len(earlier) + 1)
    stops = [
        iteration
        for iteration, loss in numbered
        if runner.call("on_result", make_result(iteration, loss=loss)) is not None
    ]
    assert stops == [expected]


def test_repeated_results_count_once() -> None:
    runner = CallbackRunner([EarlyStoppingCallback("loss", patience=3)], print)
    runner.start(make_info(Path("run")))
    rounds = [(1, 1, 1.0), (2, 1, 2.0), (3, 1, 2.0), (2, 2, 2.0), (3, 2, 2.0), (4, 2, 0.5), (5, 2, 0.6)]
    assert [runner.call("on_result", make_result(i, attempt, loss=loss)) for i, attempt, loss in rounds] == [
        None
    ] * len(rounds)


def test_results_without_the_metric_do_not_count() -> None:
    runner = CallbackRunner([EarlyStoppingCallback("val", patience=2)], print)
    runner.start(make_info(Path("run")))
    for iteration in range(1, 20):
        metrics = {"val": 1.0} if iteration in (1, 10) else {}
        assert runner.call("on_result", make_result(iteration, **metrics)) is None
    assert runner.call("on_result", make_result(20, val=1.0)) is not None


def play(
    metric: str, *rounds: dict[str, Any], first: int = 1, event: str = "sample", error: Exception | None = None
) -> list[str]:
    """Play a run whose results have these metrics; return its warnings."""
    warnings: list[str] = []
    runner = CallbackRunner([EarlyStoppingCallback(metric)], warnings.append)
    runner.start(make_info(Path("run")))
    for iteration, metrics in enumerate(rounds, start=first):
        runner.call("on_result", make_result(iteration, **metrics))
    runner.call("on_event", Event(event, 0.0, {"why": "enough"}))
    runner.end(error)
    return warnings


def test_metric_that_is_never_reported_is_an_error_at_the_end() -> None:
    with pytest.raises(MissingMetricError, match=r"no result had the metric 'los' \(did you mean 'loss'\?\)") as caught:
        play("los", {}, {})
    assert caught.value.key == "los"


def test_metric_that_is_not_in_the_first_result_is_warned_about_once() -> None:
    (warning,) = play("acc", {}, {}, {"acc": 1.0}, {}, {"acc": 0.5})
    assert warning.startswith(
        "the first result has no metric 'acc'; it has loss. Until a result has it, early stopping"
    )


@pytest.mark.parametrize("how", [{"first": 5}, {"event": "stop"}, {"error": ValueError("no")}])
def test_run_that_may_have_been_too_short_is_no_error(how: dict[str, Any]) -> None:
    assert len(play("acc", {}, {}, **how)) == 1


def test_run_without_results_is_no_error() -> None:
    assert play("acc") == []


def test_flat_metric_counts_where_a_nested_one_has_its_name() -> None:
    metrics = {"val/acc": math.nan, "val": {"acc": 1.0}}
    with pytest.raises(FloatingPointError, match="val/acc is nan"):
        play("val/acc", metrics)


def test_second_run_resets_early_stopping() -> None:
    callback = EarlyStoppingCallback("loss", patience=2)
    assert stopped_at(callback, [1, 2, 2]) == 3
    assert stopped_at(callback, [9, 8, 7, 6]) is None


def test_nan_ends_the_run_with_an_error() -> None:
    with pytest.raises(FloatingPointError, match="loss is nan at iteration 2"):
        stopped_at(EarlyStoppingCallback("loss"), [1.0, math.nan])


def test_metric_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(MetricError, match="loss='low' is not a number"):
        stopped_at(EarlyStoppingCallback("loss"), ["low"])


@pytest.mark.parametrize("settings", [{"mode": "less"}, {"patience": 0}, {"min_delta": -1}, {"metric": ""}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EarlyStoppingCallback(**{"metric": "loss", **settings})
