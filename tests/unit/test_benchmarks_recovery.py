"""The benchmarks of recovery: what is read from the marks of a training's steps, and what the page says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import results
from bench.measures import RECOVERY, load_measure
from bench.pages.recovery import PAGE, num_tries
from bench.picture import draw_rows
from bench.program import make_turns
from bench.steps import newest_group, read_marks
from bench.table import fill_rows

MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 8.0, "system": "Linux 6", "versions": {}}


def mark(folder: Path, group: int, size: int, rank: int, *times: float, more: str = "") -> None:
    text = "".join(f"{time!r}\n" for time in times) + more
    (folder / f"{group}-{size}-{rank}-{1000 + rank}.steps").write_text(text, encoding="utf-8")


def make_document(**measures: dict[str, dict[str, list[float]]]) -> results.Document:
    document = results.new_document(MACHINE)
    for name, systems in measures.items():
        results.begin_measure(document, name, "A title", {}, quick=False)
        for system, series in systems.items():
            results.add_samples(document, name, system, {}, {"series": series})
    return document


def rows_of(document: results.Document) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in fill_rows(document, PAGE.rows)}


# -- groups -------------------------------------------------------------------------------------------------------


def test_group_begins_with_the_first_step_of_its_slowest_rank(tmp_path: Path) -> None:
    mark(tmp_path, 1, 2, 0, 100.25, 100.5, 100.75)
    mark(tmp_path, 1, 2, 1, 100.375, 100.625)
    group = newest_group(tmp_path)
    assert group is not None
    assert (group.first_step, group.last_step, group.steps, group.pids) == (100.375, 100.75, 2, (1000, 1001))


@pytest.mark.parametrize("written", ["", "101.25"])
def test_group_without_a_step_of_each_rank_is_ignored(tmp_path: Path, written: str) -> None:
    mark(tmp_path, 1, 1, 0, 100.25)
    mark(tmp_path, 2, 2, 0, 101.25)
    mark(tmp_path, 2, 2, 1, more=written)
    group = newest_group(tmp_path)
    assert group is not None and group.number == 1


def test_newest_group_is_found_whatever_its_size(tmp_path: Path) -> None:
    for rank in range(3):
        mark(tmp_path, 1, 3, rank, 100.25)
    mark(tmp_path, 2, 1, 0, 101.25)
    group = newest_group(tmp_path)
    assert group is not None and (group.number, group.size) == (2, 1)
    assert newest_group(tmp_path / "nowhere") is None


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    mark(tmp_path, 1, 1, 0, *[1000.125 + step for step in range(50)], more="10")
    (path,) = tmp_path.iterdir()
    first, last, steps = read_marks(path)
    assert (first, last) == (1000.125, 1049.125)
    assert steps == pytest.approx(50, abs=2)


# -- rows and page ------------------------------------------------------------------------------------------------


def test_each_variant_of_raysgd_has_its_own_row_and_target() -> None:
    seconds = {"ray_train": 12.0, "bare": 2.0, "raysgd_spare": 0.4, "raysgd_replace": 2.7, "raysgd_elastic": 0.6}
    document = make_document(kill={system: {"seconds": [value]} for system, value in seconds.items()})
    rows = rows_of(document)
    assert rows["kill_spare"]["cells"]["raysgd"]["value"] == 0.4
    assert rows["kill_spare"]["cells"].keys() == {"ray_train", "bare", "raysgd"}
    assert rows["kill_spare"]["times_better_than_ray_train"] == 30
    met = {key: row["met"] for key, row in rows.items()}
    assert met == {"kill_spare": True, "kill_elastic": False, "kill_replace": False}


def test_failed_tries_are_counted_and_listed() -> None:
    document = make_document(reliability={"raysgd_replace": {"recovered_percent": [90.0], "seconds": [1.0] * 18}})
    line = {"series": {}, "errors": ["TimeoutError: the next group did not come"] * 2}
    results.add_samples(document, "reliability", "raysgd_replace", {}, line)
    rows = rows_of(document)
    assert rows["again"]["met"] is False
    assert rows["again_s"]["cells"]["raysgd"]["failed"] == 2
    assert num_tries(document) == 20
    page = PAGE.render(document)
    assert "**1 s (2 failed)**" in page
    assert "- A title, raysgd_replace: TimeoutError: the next group did not come (2 times)" in page


def test_page_shows_what_was_measured(tmp_path: Path) -> None:
    document = make_document(steady={"raysgd_spare": {"percent": [-0.2, 0.4, 0.6], "idle_percent": [0.8]}})
    assert "| cost of readiness in a 10 ms step | - | - | - | **0.4 %** | - | ≤ 1 % | yes |" in PAGE.render(document)
    assert draw_rows(fill_rows(document, PAGE.rows), tmp_path / "recovery.svg") == tmp_path / "recovery.svg"
    assert draw_rows([], tmp_path / "nothing.svg") is None


def test_rows_show_series_of_their_measure_and_its_systems() -> None:
    for row in PAGE.rows:
        measure = load_measure(row.measure)
        assert row.series in measure.units and row.ours in measure.systems, row.key
    assert {row.measure for row in PAGE.rows} == set(RECOVERY)


def test_each_repetition_has_its_own_process() -> None:
    measures = [load_measure(name) for name in RECOVERY]
    assert all(len(turn.measures) == 1 for turn in make_turns(measures, quick=False))
    for measure in measures:
        assert set(measure.systems_of(quick=True)) <= set(measure.systems)
        for system in measure.systems:
            full, quick = measure.params(system, False), measure.params(system, True)
            assert json.loads(json.dumps(full)).keys() == quick.keys()
