"""The benchmarks of feeding: what is compared, the page, and the data they are made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import results
from bench.measures import INGEST, load_measure
from bench.measures.ingest import decode, write_images
from bench.pages.ingest import PAGE
from bench.systems.base import System
from bench.table import fill_rows

MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 8.0, "system": "Linux 6", "versions": {}}


def test_rows_show_series_of_their_measure_and_its_systems() -> None:
    for row in PAGE.rows:
        measure = load_measure(row.measure)
        assert row.series in measure.units and "raysgd" in measure.systems
        assert {limit.of for limit in row.limits} <= {None, *measure.systems}
        for system in measure.systems:
            full, quick = measure.params(system, False), measure.params(system, True)
            assert json.loads(json.dumps(full)).keys() == quick.keys()
            assert all(size["rows"] % size["files"] == 0 for size in (full, quick) if "rows" in size)
    assert {row.measure for row in PAGE.rows} == set(INGEST)


def test_page_shows_factor_over_ray_train() -> None:
    document = results.new_document(MACHINE)
    results.begin_measure(document, "ingest_files", "A title", {}, quick=False)
    for system, rate in (("ray_train", 1e5), ("pyarrow", 3e6), ("raysgd", 2e6)):
        results.add_samples(document, "ingest_files", system, {}, {"series": {"rows_per_s": [rate]}})
    row = fill_rows(document, PAGE.rows)[0]
    assert row["met"] is True and row["times_better_than_ray_train"] == 20
    page = PAGE.render(document)
    assert "plain pyarrow 3,000,000 /s | **2,000,000 /s** | 20x | ≥ 10x Ray Train, ≥ 0.5x plain pyarrow | yes |" in page


def test_planning_is_measured_on_real_files(tmp_path: Path) -> None:
    planning = load_measure("ingest_planning")
    size = {"files": 3, "workers": 2, "batches": 4}
    series = planning.run(System("raysgd", tmp_path), size)
    assert series.keys() == planning.units.keys() and all(value > 0 for (value,) in series.values())
    (tmp_path / "other").mkdir()
    assert planning.run(System("pyarrow", tmp_path / "other"), size).keys() == {"look_s"}


def test_written_images_are_decoded(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    folder = write_images(tmp_path / "images", 8, 2)
    table = pq.read_table(folder)
    batch = decode({name: np.array(table[name].to_pylist(), object) for name in ("image", "y")} | {"y": np.arange(8)})
    assert batch["image"].shape == (8, 224, 224, 3) and batch["y"].tolist() == list(range(8))
