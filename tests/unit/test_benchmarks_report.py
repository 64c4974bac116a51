"""The benchmarks' figures and page: from samples to statistics, rows, and what the page says of them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import results, table
from bench.measures import NAMES, load_measure
from bench.pages.comparison import PAGE
from bench.program import compare_with_published, make_turns

MACHINE = {
    "cores": 2,
    "processor": "a processor",
    "memory_gib": 8.0,
    "system": "Linux 6",
    "versions": {"ray": "2.60.0"},
}
COLD = next(row for row in PAGE.rows if row.key == "cold")
RATE = next(row for row in PAGE.rows if row.key == "rate")


def make_document(measure: str, samples: dict[str, dict[str, list[float]]]) -> results.Document:
    document = results.new_document(MACHINE)
    results.begin_measure(document, measure, "A title", {}, quick=False)
    for system, series in samples.items():
        results.add_samples(document, measure, system, {}, {"series": series})
    return document


def fill(row: table.Row, **samples: list[float]) -> dict[str, Any]:
    document = make_document(row.measure, {system: {row.series: values} for system, values in samples.items()})
    return table.fill_row(row, document["measures"][row.measure])


# -- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "expected"), [(0, 1), (0.25, 1.75), (0.5, 2.5), (1, 4)])
def test_quantiles_lie_between_neighbours(share: float, expected: float) -> None:
    assert results.quantile([4, 1, 3, 2], share) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(123456.789, 123460), (0.00012345678, 0.00012346), (0, 0), (-1.5, -1.5)]
)
def test_rounding_keeps_five_digits(value: float, expected: float) -> None:
    assert results.rounded(value) == expected


@pytest.mark.parametrize(("costs", "expected"), [([1, 8, 64], 1), ([1, 3, 4096], 2), ([5, 5, 5], 0)])
def test_growth_is_the_exponent(costs: list[float], expected: float) -> None:
    assert results.growth([1, 8, 64], costs) == pytest.approx(expected)


# -- the document -------------------------------------------------------------------------------------------------


@given(st.integers(6, 200), st.randoms(use_true_random=False))
def test_a_median_lies_in_its_interval(number: int, random: Random) -> None:
    samples = random.sample(range(10**6), number)
    interval = results.median_interval(samples)
    assert interval is not None
    low, high = interval
    assert low <= results.quantile(samples, 0.5) <= high
    # The interval of the binomial distribution of how many samples are below the true median.
    below = [sum(sample < end for sample in samples) for end in interval]
    covered = sum(math.comb(number, count) for count in range(below[0] + 1, below[1] + 1)) / 2**number
    assert covered >= 0.95


def test_few_samples_give_no_interval() -> None:
    assert results.median_interval([1.0] * 5) is None


def test_samples_of_all_repetitions_are_pooled() -> None:
    document = make_document("start", {"raysgd": {"cold_s": [3.0]}})
    results.add_samples(document, "start", "raysgd", {}, {"series": {"cold_s": [1.0, 2.0]}})
    series = document["measures"]["start"]["systems"]["raysgd"]["series"]["cold_s"]
    assert (series["n"], series["median"], series["samples"]) == (3, 2.0, [3.0, 1.0, 2.0])


def test_a_saved_document_is_read_back_on_the_same_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.json"
    document = make_document("start", {"raysgd": {"cold_s": [1.0, -2.5e-7]}})
    results.save(document, path)
    assert results.load(path, MACHINE) == document
    assert "[1.0, -2.5e-07]" in path.read_text()
    assert results.load(path, {**MACHINE, "cores": 64})["measures"] == {}


# -- rows ---------------------------------------------------------------------------------------------------------


def test_a_target_relative_to_others_needs_all_of_them() -> None:
    met = fill(COLD, ray_train=[10.0], bare=[4.0], raysgd=[4.5, 4.6])
    assert met["met"] is True
    assert met["limits"] == [5.0, pytest.approx(4.6)]
    assert met["target"] == "≤ 0.5x Ray Train, ≤ 1.15x bare actors"
    assert fill(COLD, ray_train=[10.0], bare=[3.0], raysgd=[4.5])["met"] is False
    assert fill(COLD, ray_train=[10.0], raysgd=[4.5])["met"] is None


def test_the_factor_counts_what_is_better_as_more() -> None:
    assert fill(COLD, ray_train=[10.0], raysgd=[4.0])["times_better_than_ray_train"] == 2.5
    assert fill(RATE, ray_train=[1.0], raysgd=[150_000.0])["times_better_than_ray_train"] == 150_000
    assert fill(RATE, raysgd=[150_000.0])["met"] is True
    assert fill(RATE, raysgd=[99_000.0])["met"] is False


def test_rows_show_series_of_their_measure() -> None:
    assert {
        (row.measure, row.series) for row in PAGE.rows if row.series not in load_measure(row.measure).units
    } == set()
    assert {row.measure for row in PAGE.rows} == set(NAMES)


# -- the page -----------------------------------------------------------------------------------------------------


def test_failed_measure_is_shown_next_to_the_others() -> None:
    document = make_document("start", {"raysgd": {"cold_s": [4.0]}, "bare": {"cold_s": [3.9]}})
    results.add_samples(document, "start", "ray_train", {}, {"error": "RuntimeError: a | b"})
    line = next(line for line in PAGE.render(document).splitlines() if line.startswith("| cold"))
    assert "failed: RuntimeError: a / b" in line
    assert "bare actors 3.9 s" in line
    assert "**4 s**" in line
    assert line.endswith("| - |")


def test_a_missed_target_stands_out() -> None:
    document = make_document("exception", {"raysgd": {"seconds": [0.5]}, "ray_train": {"seconds": [2.0]}})
    line = next(line for line in PAGE.render(document).splitlines() if line.startswith("| exception"))
    assert "| 4x | ≤ 0.3 s | **no** |" in line


def test_missed_targets_are_listed_with_the_reason() -> None:
    def page(percent: float) -> str:
        return PAGE.render(make_document("overhead", {"raysgd": {"percent": [percent]}}))

    assert "- **cost in a 10 ms step that reports every 10th**: 1.5 % (≤ 0.5 %). The two workers keep both" in page(1.5)
    assert "What is missed" not in page(0.5)
    missed = table.missed([fill(RATE, raysgd=[99_000.0])], {})
    assert missed.endswith("No reason is known.\n")
    assert set(PAGE.reasons) <= {row.key for row in PAGE.rows}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0017234, "0.00172"), (1876543, "1,880,000"), (99.96, "100"), (0, "0"), (2e-6, "0.000002")],
)
def test_numbers_have_three_digits_that_matter(value: float, expected: str) -> None:
    assert table.number(value) == expected


# -- turns --------------------------------------------------------------------------------------------------------


def test_systems_take_turns_and_warm_measures_share_a_process() -> None:
    turns = make_turns([load_measure("rate"), load_measure("start"), load_measure("latency")], quick=False, repeat=2)
    warm = [turn for turn in turns if turn.measures == ("rate", "latency")]
    assert [turn.system for turn in warm[:3]] == ["ray_train", "ray_train_tuned", "raysgd"]
    assert [turn.system for turn in warm[3:]] == ["ray_train_tuned", "raysgd", "ray_train"]
    alone = [turn.system for turn in turns if turn.measures == ("start",)]
    assert len(alone) == 2 * len(set(alone)) == 14


def test_sizes_are_plain_data_and_smaller_when_quick() -> None:
    for name in NAMES:
        measure = load_measure(name)
        for system in measure.systems:
            full, quick = measure.params(system, False), measure.params(system, True)
            assert json.loads(json.dumps(full)).keys() == quick.keys()


def test_own_figures_stand_next_to_the_published_ones() -> None:
    def filled(samples: float, *, other: float | None = None) -> results.Document:
        document = make_document("start", {"raysgd": {"cold_s": [samples]}})
        if other is not None:
            results.add_samples(document, "start", "bare", {}, {"series": {"cold_s": [other]}})
        return document | {"rows": table.fill_rows(document, PAGE.rows)}

    shown = compare_with_published(filled(2.5), filled(2.0, other=1.7))
    assert "| cold: call to first line of train_func | 2.5 s | 2 s | bare actors 1.7 s |" in shown
    assert "another processor" not in shown
    alone = compare_with_published(filled(2.5), None)
    assert "| 2.5 s | - | - |" in alone and "Nothing is published" in alone
