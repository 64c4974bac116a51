"""The benchmarks of feeding: what is compared, the page, and the data they are made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import feeding, ingest_rows, results
from bench.measures import INGEST, load_measure
from bench.rows import fill_rows
from bench.systems.base import System

MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 8.0, "system": "Linux 6", "versions": {}}


def test_every_row_tells_a_series_that_its_measure_gives_and_compares_systems_that_it_has() -> None:
    for row in ingest_rows.ROWS:
        measure = load_measure(row.measure)
        assert row.series in measure.UNITS and "raysgd" in measure.SYSTEMS
        assert {limit.of for limit in row.limits} <= {None, *measure.SYSTEMS}
        for system in measure.SYSTEMS:
            full, quick = measure.params(system, quick=False), measure.params(system, quick=True)
            assert json.loads(json.dumps(full)).keys() == quick.keys()
            assert all(size["rows"] % size["files"] == 0 for size in (full, quick) if "rows" in size)
    assert {row.measure for row in ingest_rows.ROWS} == set(INGEST)


def test_the_page_says_by_how_much_each_is_better() -> None:
    document = results.new_document(MACHINE)
    results.begin_measure(document, "ingest_files", "A title", {}, quick=False)
    for system, rate in (("ray_train", 1e5), ("pyarrow", 3e6), ("raysgd", 2e6)):
        results.add_samples(document, "ingest_files", system, {}, {"series": {"rows_per_s": [rate]}})
    row = fill_rows(document, ingest_rows.ROWS)[0]
    assert row["met"] is True and row["times_better_than_ray_train"] == 20
    page = ingest_rows.render_page(document)
    assert "plain pyarrow 3,000,000 /s | **2,000,000 /s** | 20x | ≥ 10x Ray Train, ≥ 0.5x plain pyarrow | yes |" in page


def test_planning_is_measured_on_real_files(tmp_path: Path) -> None:
    planning = load_measure("ingest_planning")
    size = {"files": 3, "workers": 2, "batches": 4}
    series = planning.run(System("raysgd", tmp_path), size)
    assert series.keys() == planning.UNITS.keys() and all(value > 0 for (value,) in series.values())
    (tmp_path / "other").mkdir()
    assert planning.run(System("pyarrow", tmp_path / "other"), size).keys() == {"look_s"}


def test_images_are_decoded_to_what_they_were_written_as(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    folder = feeding.write_images(tmp_path / "images", 8, 2)
    table = pq.read_table(folder)
    batch = feeding.decode(
        {name: np.array(table[name].to_pylist(), object) for name in ("image", "y")} | {"y": np.arange(8)}
    )
    assert batch["image"].shape == (8, 224, 224, 3) and batch["y"].tolist() == list(range(8))
