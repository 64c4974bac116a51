"""The benchmark of backends: what is compared, and the page."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import results
from bench.measures import BACKENDS, load_measure
from bench.pages.backends import PAGE
from bench.picture import draw_rows
from bench.systems import FRAMEWORKS, TITLES, framework_of, missing_framework
from bench.table import fill_rows

MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 8.0, "system": "Linux 6", "versions": {}}


def make_document(**measures: dict[str, dict[str, list[float]]]) -> results.Document:
    document = results.new_document(MACHINE)
    for name, systems in measures.items():
        results.begin_measure(document, name, "A title", {}, quick=False)
        for system, series in systems.items():
            results.add_samples(document, name, system, {}, {"series": series})
    return document


def rows_of(document: results.Document) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in fill_rows(document, PAGE.rows)}


def test_rows_show_series_of_their_measure_and_its_systems() -> None:
    for row in PAGE.rows:
        measure = load_measure(row.measure)
        assert row.series in measure.units and row.ours in measure.systems, row.key
        assert {limit.of for limit in row.limits} <= {None, *measure.systems}, row.key
        assert row.peers is not None and set(row.peers) <= set(TITLES), row.key
        assert {framework_of(peer) for peer in row.peers} <= {FRAMEWORKS[row.ours]}, row.key
    assert {row.measure for row in PAGE.rows} == set(BACKENDS)
    assert len({row.key for row in PAGE.rows}) == len(PAGE.rows)


@pytest.mark.parametrize("name", BACKENDS)
def test_sizes_are_plain_data(name: str) -> None:
    measure = load_measure(name)
    for system in measure.systems:
        full, quick = measure.params(system, False), measure.params(system, True)
        assert json.loads(json.dumps(full)).keys() == quick.keys()


def test_each_backend_is_compared_with_its_own_framework() -> None:
    seconds = {"torchrun": 2.0, "raysgd_torch": 2.1, "raysgd_horovod": 3.0, "horovod_executor": 2.0, "horovodrun": 6.0}
    document = make_document(backend_start={system: {"cold_s": [value]} for system, value in seconds.items()})
    rows = rows_of(document)
    assert rows["start_torch"]["cells"].keys() == {"torchrun", "raysgd"}
    assert rows["start_horovod"]["cells"].keys() == {"horovod_executor", "horovodrun", "raysgd"}
    assert (rows["start_torch"]["met"], rows["start_horovod"]["met"]) == (True, False)
    assert "start_jax" not in rows, "raysgd was not measured with it"
    page = PAGE.render(document)
    assert (
        "| RayExecutor 2 s, horovodrun 6 s | **3 s** | 1.5x RayExecutor, 0.5x horovodrun | ≤ 1.2x RayExecutor | **no** |"
        in page
    )


def test_more_bandwidth_is_better(tmp_path: Path) -> None:
    systems = {"jax": {"1 MiB": [300e6], "4 KiB": [10e6]}, "raysgd_jax": {"1 MiB": [284e6], "4 KiB": [12e6]}}
    document = make_document(backend_allreduce=systems)
    rows = rows_of(document)
    assert (rows["allreduce_jax_1_MiB"]["met"], rows["allreduce_jax_4_KiB"]["met"]) == (False, True)
    line = "| JAX: all-reduce of 4 KiB | plain JAX 10 MB/s | **12 MB/s** | 1.2x plain JAX | ≥ 0.95x plain JAX | yes |"
    assert line in PAGE.render(document)
    assert draw_rows(list(rows.values()), tmp_path / "backends.svg") == tmp_path / "backends.svg"


def test_neighbouring_blocks_are_compared_in_pairs() -> None:
    """The machine was three times as fast in some of them."""
    series = {"jax": [10e6, 30e6, 10e6, 32e6, 31e6, 30e6], "raysgd_jax": [9.8e6, 29.4e6, 9.8e6, 9.9e6, 9.7e6, 33e6]}
    document = make_document(backend_allreduce={system: {"4 KiB": samples} for system, samples in series.items()})
    row = rows_of(document)["allreduce_jax_4_KiB"]
    assert row["cells"]["jax"]["ratio"]["value"] == 0.98 and row["met"] is True
    assert "| plain JAX 30 MB/s | **9.85 MB/s** | 0.98x (0.309 to 1.1) plain JAX | ≥ 0.95x plain JAX | yes |" in (
        PAGE.render(document)
    )
    series["jax"].pop()  # a repetition failed: no pairs
    document = make_document(backend_allreduce={system: {"4 KiB": samples} for system, samples in series.items()})
    row = rows_of(document)["allreduce_jax_4_KiB"]
    assert "ratio" not in row["cells"]["jax"] and row["met"] is False


def test_a_page_without_figures_says_so() -> None:
    page = PAGE.render(results.new_document(MACHINE))
    assert "Nothing has been measured yet." in page and "backends.svg" not in page


def test_horovods_timeout_is_part_of_its_limit() -> None:
    document = make_document(
        backend_kill={f"raysgd_{name}": {"seconds": [11.0]} for name in ("torch", "horovod", "jax")}
    )
    rows = rows_of(document)
    assert [rows[f"kill_{name}"]["met"] for name in ("torch", "horovod", "jax")] == [False, True, None]


def test_missing_frameworks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "horovod" else object())
    missing = {system for system in TITLES if missing_framework(system)}
    assert missing == {"horovod_executor", "horovodrun"}
    assert missing_framework("raysgd_horovod") == "horovod" and missing_framework("raysgd") is None
