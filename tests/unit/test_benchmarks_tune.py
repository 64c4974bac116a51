"""The benchmark of searches: what is compared, and the page."""

from __future__ import annotations

import sys

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import results, tune_rows
from bench.measures import TUNE, load_measure
from bench.rows import fill_rows

MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 8.0, "system": "Linux 6", "versions": {}}


def test_every_row_tells_a_series_that_its_measure_gives() -> None:
    for row in tune_rows.ROWS:
        measure = load_measure(row.measure)
        assert row.series in measure.UNITS and {limit.of for limit in row.limits} <= set(measure.SYSTEMS)
        assert measure.params("raysgd", quick=False) == {"trials": 12}
    assert {row.measure for row in tune_rows.ROWS} == set(TUNE)


def test_the_page_says_what_is_reached_and_what_is_not() -> None:
    document = results.new_document(MACHINE)
    results.begin_measure(document, "tune_search", "A search", {}, quick=False)
    for system, search_s, reused_s in (("ray_train", 200.0, 180.0), ("raysgd", 20.0, 10.0)):
        series = {"search_s": [search_s], "reused_s": [reused_s]}
        results.add_samples(document, "tune_search", system, {}, {"series": series})
    search, reused = fill_rows(document, tune_rows.ROWS)
    assert (search["met"], reused["met"]) == (True, False)
    page = tune_rows.render_page(document)
    assert "| 10x | ≤ 0.12x Ray Train | yes |" in page and "| 18x | ≤ 0.05x Ray Train | **no** |" in page
