"""Merging reports of ranks into results: any order of arrival gives the same rounds, over returns and new attempts."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._util.json import encode_rows
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.rounds import AwaitedMetrics, RoundMerger, check_reduce, reduce_metrics
from raysgd.errors import ConfigError
from raysgd.result import Result


def attempt(
    number: int = 1, world_size: int = 2, iterations_before: int = 0, time_before_s: float = 0.0, **more: int
) -> Frame:
    data = {
        **more,
        "attempt": number,
        "world_size": world_size,
        "iterations_before": iterations_before,
        "time_before_s": time_before_s,
    }
    return Frame(0, frames.ATTEMPT, number, data=data)


def reports(rank: int, first: int, count: int = 1, number: int = 1) -> Frame:
    """Return reports of a rank; report n was made after n + 1 seconds of training and holds `rank` and `n`."""
    rows = [[100.0 + n + rank, float(n + 1), {"rank": rank, "n": n}] for n in range(first, first + count)]
    return Frame(0, frames.REPORTS, number, rank, {"first": first, "count": count}, json.dumps(rows).encode())


def done(rank: int, number: int = 1) -> Frame:
    return Frame(0, frames.RANK_DONE, number, rank)


def end(keep_rounds: int | None, number: int = 1) -> Frame:
    return Frame(0, frames.ATTEMPT_END, number, data={"keep_rounds": keep_rounds})


def merge(given: Iterable[Frame], reduce: dict[str, str] | None = None) -> list[Result]:
    merger = RoundMerger(reduce)
    return [result for frame in given for result in merger.feed(frame)]


def rounds(results: list[Result]) -> list[tuple[int, tuple[int, ...], list[int]]]:
    """Return the iteration, the ranks, and the number of each rank's report, for each result."""
    return [(r["training_iteration"], r.ranks, [worker["n"] for worker in r.workers]) for r in results]


# -- one attempt -------------------------------------------------------------------------------------------------------


def test_round_is_emitted_when_every_running_rank_reported() -> None:
    merger = RoundMerger()
    assert list(merger.feed(attempt())) == []
    assert list(merger.feed(reports(0, 0, 2))) == []
    assert rounds(list(merger.feed(reports(1, 0)))) == [(1, (0, 1), [0, 0])]
    assert rounds(list(merger.feed(reports(1, 1)))) == [(2, (0, 1), [1, 1])]


def test_result_has_metrics_of_rank_0_and_automatic_keys() -> None:
    (result,) = merge([attempt(), reports(1, 0), reports(0, 0)])
    assert result == {
        "rank": 0,
        "n": 0,
        "training_iteration": 1,
        "timestamp": 100.0,
        "time_this_iter_s": 1.0,
        "time_total_s": 1.0,
        "world_size": 2,
        "attempt": 1,
    }
    assert result.workers == [{"rank": 0, "n": 0}, {"rank": 1, "n": 0}]


def test_returned_rank_takes_part_up_to_its_last_report() -> None:
    given = [attempt(), reports(0, 0, 2), done(0), reports(1, 0, 4), done(1)]
    assert rounds(merge(given)) == [(1, (0, 1), [0, 0]), (2, (0, 1), [1, 1]), (3, (1,), [2]), (4, (1,), [3])]


def test_rounds_without_a_rank_are_emitted_when_it_returns() -> None:
    merger = RoundMerger()
    for frame in (attempt(), reports(1, 0, 2)):
        assert list(merger.feed(frame)) == []
    assert rounds(list(merger.feed(done(0)))) == [(1, (1,), [0]), (2, (1,), [1])]


def test_time_this_iter_counts_from_previous_report_of_same_rank() -> None:
    given = [attempt(), reports(0, 0, 2), done(0), reports(1, 0, 4), done(1)]
    assert [result["time_this_iter_s"] for result in merge(given)] == [1.0, 1.0, 1.0, 1.0]


def test_ranks_need_not_report_at_all() -> None:
    assert merge([attempt(), done(0), done(1), end(None)]) == []


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[int], list[list[Frame]]]:
    """Draw the number of reports of each rank, and the frames of each rank in order."""
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    streams: list[list[Frame]] = []
    for rank, count in enumerate(counts):
        cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=3))})
        streams.append([reports(rank, a, b - a) for a, b in itertools.pairwise(cuts)])
    return counts, streams


def interleaved(streams: list[list[Frame]], draw: Any) -> list[Frame]:
    """Return the frames of all streams in one sequence that keeps the order of each stream."""
    left = [list(stream) for stream in streams]
    merged: list[Frame] = []
    while any(left):
        index = draw(st.sampled_from([i for i, stream in enumerate(left) if stream]))
        merged.append(left[index].pop(0))
    return merged


@given(arrivals(), st.data())
def test_any_interleaving_of_batches_gives_the_same_rounds_in_order(
    arrived: tuple[list[int], list[list[Frame]]], data: st.DataObject
) -> None:
    counts, streams = arrived
    with_ends = [[*stream, done(rank)] for rank, stream in enumerate(streams)]
    results = merge([attempt(world_size=len(counts)), *interleaved(with_ends, data.draw), end(None)])
    expected = [
        (n + 1, ranks, [n] * len(ranks))
        for n in range(max(counts))
        if (ranks := tuple(rank for rank, count in enumerate(counts) if count > n))
    ]
    assert rounds(results) == expected
    assert [result["time_this_iter_s"] for result in results] == [1.0] * len(expected)


@given(arrivals(), st.integers(0, 8), st.data())
def test_ended_attempt_keeps_rounds_up_to_newest_checkpoint(
    arrived: tuple[list[int], list[list[Frame]]], keep: int, data: st.DataObject
) -> None:
    counts, streams = arrived
    results = merge([attempt(world_size=len(counts)), *interleaved(streams, data.draw), end(keep)])
    num_rounds = max(min(counts), min(keep, max(counts)))
    assert [result["training_iteration"] for result in results] == list(range(1, num_rounds + 1))
    for n, result in enumerate(results):
        assert result.ranks == tuple(rank for rank, count in enumerate(counts) if count > n)


# -- several attempts --------------------------------------------------------------------------------------------------


def test_iteration_and_time_continue_from_the_checkpoint() -> None:
    first = [attempt(1, 1), reports(0, 0, 3), end(2)]
    second = [
        attempt(2, 1, iterations_before=2, time_before_s=2.0),
        reports(0, 2, 2, number=2),
        done(0, 2),
        end(None, 2),
    ]
    results = merge([*first, *second])
    assert [(r["training_iteration"], r["attempt"]) for r in results] == [(1, 1), (2, 1), (3, 1), (3, 2), (4, 2)]
    assert [r["time_total_s"] for r in results] == [1, 2, 3, 3, 4]
    assert [r["time_this_iter_s"] for r in results] == [1, 1, 1, 1, 1]


def test_result_has_world_size_of_its_attempt() -> None:
    results = merge([attempt(1, 2), reports(0, 0), reports(1, 0), end(1), attempt(2, 1, 1), reports(0, 0, number=2)])
    assert [(r["world_size"], r.ranks) for r in results] == [(2, (0, 1)), (1, (0,))]


def test_pending_reports_are_dropped_when_an_attempt_ends() -> None:
    given = [attempt(1), reports(0, 0, 5), end(0), attempt(2), reports(0, 0, number=2), reports(1, 0, number=2)]
    (result,) = merge(given)
    assert (result["attempt"], result.workers[0]["n"]) == (2, 0)


@pytest.mark.parametrize("number", [1, 3])
def test_reports_of_another_attempt_make_no_rounds(number: int) -> None:
    given = [attempt(1, 1), end(0), attempt(2, 1), reports(0, 0, number=number), done(0, 2)]
    assert merge(given) == []


def test_reports_after_the_end_of_their_attempt_make_no_rounds() -> None:
    assert merge([attempt(1, 1), end(0), reports(0, 0), done(0)]) == []


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_do_not_share_their_values() -> None:
    (result,) = merge([attempt(), reports(0, 0), reports(1, 0)])
    result["n"] = 7
    assert result.workers[0]["n"] == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_copied_or_pickled_result_keeps_its_workers(duplicate: Any) -> None:
    (result,) = merge([attempt(), reports(0, 0), reports(1, 0)])
    other = duplicate(result)
    assert (other, other.workers, other.ranks) == (result, result.workers, result.ranks)


def test_reduce_combines_a_metric_over_ranks() -> None:
    (result,) = merge([attempt(), reports(0, 0), reports(1, 0)], {"rank": "mean"})
    assert (result["rank"], result["n"]) == (0.5, 0)
    assert result["training_iteration"] == 1


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("mean", [1, 2, 6], 3.0),
        ("mean", [0.1] * 10, 0.1),
        ("sum", [1, 2, 3], 6),
        ("sum", [0.1] * 10, 1.0),
        ("min", [3, 1, 2], 1),
        ("max", [3, 1, 2], 3),
        ("first", ["a", "b"], "a"),
        ("last", ["a", "b"], "b"),
    ],
)
def test_reduction_gives_expected_value(name: str, values: list[Any], expected: Any) -> None:
    assert reduce_metrics([{"x": value} for value in values], {"x": name}) == {"x": expected}


@pytest.mark.parametrize("name", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("position", [0, 1])
def test_nan_survives_reduction(name: str, position: int) -> None:
    values = [1.0, 2.0]
    values[position] = math.nan
    assert math.isnan(reduce_metrics([{"x": value} for value in values], {"x": name})["x"])


def test_metric_missing_on_rank_0_is_reduced_over_reporting_ranks() -> None:
    assert reduce_metrics([{"a": 1}, {"x": 2}, {"x": 4}], {"x": "mean"}) == {"a": 1, "x": 3}


def test_values_that_are_not_numbers_are_skipped() -> None:
    assert reduce_metrics([{"x": None}, {"x": 2}], {"x": "mean"}) == {"x": 2}
    assert reduce_metrics([{"x": "a"}, {"x": "b"}], {"x": "mean"}) == {"x": "a"}


@pytest.mark.parametrize(
    ("name", "expected"), [("sum", 14), ("mean", 7), ("min", 4), ("max", 20), ("first", 4), ("last", 20)]
)
def test_each_copy_of_the_model_counts_once_in_mean_and_sum(name: str, expected: float) -> None:
    merger = RoundMerger({"x": name})
    values = [4, 5, 10, 20]
    given = [attempt(world_size=4, workers_per_replica=2)]
    given += [
        Frame(0, frames.REPORTS, 1, rank, {"first": 0, "count": 1}, encode_rows([[1.0, 1.0, {"x": value}]]))
        for rank, value in enumerate(values)
    ]
    (result,) = [result for frame in given for result in merger.feed(frame)]
    assert result["x"] == expected and result.workers == [{"x": value} for value in values]


def test_copy_counts_by_its_first_rank_that_reported_the_metric() -> None:
    workers = [{"a": 1}, {"x": 3}, {"x": None}, {"x": 5}, {"x": "?"}, {}]
    assert reduce_metrics(workers, {"x": "sum"}, [0, 0, 1, 1, 2, 2]) == {"a": 1, "x": 8}
    assert reduce_metrics(workers[:2] + workers[3:4], {"x": "mean"}, [0, 0, 1]) == {"a": 1, "x": 4}


@given(copies=st.lists(st.integers(-99, 99), min_size=1, max_size=5), each=st.integers(1, 3))
def test_reduced_value_does_not_depend_on_the_ranks_of_a_copy(copies: list[int], each: int) -> None:
    workers = [{"n": value} for value in copies for _ in range(each)]
    of_ranks = [number for number in range(len(copies)) for _ in range(each)]
    for name in ("sum", "mean", "min", "max", "first", "last"):
        expected = reduce_metrics([{"n": value} for value in copies], {"n": name})
        assert reduce_metrics(workers, {"n": name}, of_ranks) == expected


def test_unreported_metric_is_not_reduced() -> None:
    assert reduce_metrics([{"a": 1}], {"x": "mean"}) == {"a": 1}


@pytest.mark.parametrize(
    ("workers", "reduce", "expected"),
    [
        ([{"val": {"acc": 1, "n": 9}}, {"val": {"acc": 3}}], {"val/acc": "mean"}, {"val": {"acc": 2, "n": 9}}),
        ([{"val/acc": 1}, {"val": {"acc": 3}}], {"val/acc": "mean"}, {"val/acc": 2}),
        (
            [{"val/acc": 1, "val": {"acc": 7}}, {"val/acc": 3}],
            {"val/acc": "sum"},
            {"val/acc": 4, "val": {"acc": 7}},
        ),
        ([{"a": 1}, {"val": {"acc": 3}}], {"val/acc": "max"}, {"a": 1, "val": {"acc": 3}}),
        ([{"val": {"acc": 1}}], {"val": "last"}, {"val": {"acc": 1}}),
    ],
)
def test_nested_metric_is_reduced_under_its_name(
    workers: list[dict[str, Any]], reduce: dict[str, str], expected: dict[str, Any]
) -> None:
    before = copy.deepcopy(workers)
    assert reduce_metrics(workers, reduce) == expected
    assert workers == before


@pytest.mark.parametrize("given", [None, {}])
def test_missing_reduce_is_an_empty_dict(given: Any) -> None:
    assert check_reduce(given) == {}


@pytest.mark.parametrize("given", [{"loss": "median"}, {"loss": None}, "mean", ["loss"], {"loss": ["mean"]}])
def test_invalid_reduction_is_refused_with_the_allowed_names(given: Any) -> None:
    with pytest.raises(ConfigError, match="mean, sum, min, max, last, first"):
        check_reduce(given)


def test_automatic_key_is_not_reduced() -> None:
    with pytest.raises(ConfigError, match="raysgd sets time_total_s itself, once for all ranks; leave it out"):
        check_reduce({"time_total_s": "mean"})
    with pytest.raises(ConfigError, match="the key 1, which is not the name of a metric"):
        check_reduce({1: "mean"})


# -- names that are never reported -------------------------------------------------------------------------------------


def rows(*metrics: dict[str, Any]) -> bytes:
    return encode_rows([(1.0, 1.0, given) for given in metrics])


def test_names_that_no_report_has_are_missing_with_the_nearest_one() -> None:
    awaited = AwaitedMetrics({"los": "mean", "loss": "mean", "acc": "max"})
    awaited.feed(rows({"loss": 1.0, "val": {"acc": 0.5}}))
    assert awaited.missing == ("los", "acc")
    missing = (
        "'los' (did you mean 'loss'?), 'acc' (did you mean 'val/acc'?), which reduce= names; "
        "the reports have loss, val/acc"
    )
    assert (awaited.warn_of_first_round() or "").startswith(
        f"the reports of the first round have no {missing}. A later"
    )
    assert awaited.warn_of_first_round() is None  # once
    assert (awaited.warn_of_run() or "").startswith(f"no report of the run had {missing}. raysgd.load_run(")


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("loss", {"loss": None}),
        ("val/acc", {"val": {"acc": math.nan}}),
        ("val/acc", {"val/acc": 1}),
        ("é/ü", {"é": {"ü": 10**400}}),
        ('a"b', {'a"b': 1}),
        ("a\\b", {"a\\b": 1}),
    ],
)
def test_name_is_found_in_whichever_report_has_it(name: str, metrics: dict[str, Any]) -> None:
    awaited = AwaitedMetrics({name: "mean"})
    for _ in range(9):
        awaited.feed(rows({"step": 1, "acc": 1}, {"step": 2}))
    assert awaited.missing == (name,)
    assert awaited.warn_of_first_round() is not None
    awaited.feed(rows({"step": 3}, metrics))
    assert awaited.missing == () and awaited.warn_of_run() is None


def test_name_of_a_group_is_missing() -> None:
    awaited = AwaitedMetrics({"val": "last"})
    awaited.feed(rows({"val": {"acc": 1}}))
    assert awaited.missing == ("val",) and "did you mean 'val/acc'?" in (awaited.warn_of_run() or "")
