"""The benchmark of searches: what is compared, and the page."""

from __future__ import annotations

import sys

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import results
from bench.measures import TUNE, load_measure
from bench.pages.search import PAGE
from bench.table import fill_rows

MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 8.0, "system": "Linux 6", "versions": {}}


def test_rows_show_series_of_their_measure() -> None:
    for row in PAGE.rows:
        measure = load_measure(row.measure)
        assert row.series in measure.units and {limit.of for limit in row.limits} <= set(measure.systems)
        assert measure.params("raysgd", False) == {"trials": 12}
    assert {row.measure for row in PAGE.rows} == set(TUNE)


def test_page_shows_met_and_missed_targets() -> None:
    document = results.new_document(MACHINE)
    results.begin_measure(document, "tune_search", "A search", {}, quick=False)
    for system, search_s, reused_s in (("ray_train", 200.0, 180.0), ("raysgd", 20.0, 10.0)):
        series = {"search_s": [search_s], "reused_s": [reused_s]}
        results.add_samples(document, "tune_search", system, {}, {"series": series})
    search, reused = fill_rows(document, PAGE.rows)
    assert (search["met"], reused["met"]) == (True, False)
    page = PAGE.render(document)
    assert "| 10x | ≤ 0.12x Ray Train | yes |" in page and "| 18x | ≤ 0.05x Ray Train | **no** |" in page
