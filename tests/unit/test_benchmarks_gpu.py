"""The benchmark on a GPU: its sizes and its page."""

from __future__ import annotations

import json
import sys
from typing import Any

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench import results
from bench.measures.gpu import GPU_STEP
from bench.pages.gpu import PAGE

FOLDER = ROOT / "doc" / "benchmarks"
MACHINE = {
    "gpu": "a GPU",
    "cores": 16,
    "processor": "a processor",
    "memory_gib": 128.0,
    "system": "Linux 6",
    "versions": {},
}


def make_document(with_ray: bool, **series: list[float]) -> dict[str, Any]:
    document = results.new_document(MACHINE)
    results.begin_measure(document, "gpu_step", GPU_STEP.title, GPU_STEP.units, quick=False)
    results.add_samples(document, "gpu_step", "pinned_copy", {}, {"series": {"stall_s": [0.01]}})
    results.add_samples(document, "gpu_step", "raysgd", {"with_ray": with_ray}, {"series": series})
    return document


def test_published_page_is_that_of_its_results() -> None:
    path = FOLDER / "gpu.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else results.new_document({})
    page = PAGE.render(document)
    assert (FOLDER / "gpu.md").read_text(encoding="utf-8") == page
    assert ("Nothing has run on a GPU yet." in page) == (not path.exists())


def test_page_shows_figures_and_targets() -> None:
    series = {"report_s": [20e-6], "percent": [1.5], "stall_s": [0.02, 0.02], "first_stall_s": [0.3]}
    page = PAGE.render(make_document(with_ray=True, **series))
    assert "| `report()` of a CUDA scalar | - | **20 us** | ≤ 100 us | yes |" in page
    assert "| cost in a 10 ms step that reports a CUDA scalar | - | **1.5 %** | ≤ 1 % | **no** |" in page
    line = "| stall of a checkpoint of 512 MB, second and later | plain copy 0.01 s | **0.02 s** | ≤ 0.1 s | yes |"
    assert line in page and "| stall of the first | - | **0.3 s** | - | - |" in page
    assert "Measured on a GPU, 16 cores" in page and "gpu.svg" not in page


def test_page_marks_figures_that_are_older_than_a_repair_and_names_missed_targets_of_the_engine() -> None:
    def case(title: str, engine_ms: float) -> dict[str, Any]:
        times = {"by_hand_ms": 100.0, "engine_ms": engine_ms, "by_hand_gb": None, "engine_gb": 20.5}
        return {"title": title, **times}

    engine = {
        "model": "model",
        "measured": "a day",
        "peak_tflops": 790,
        "mfu": {"compiled": 0.58},
        "cases": [case("plain", 101.0), case("ZeRO 3", 121.0)],
        "memory_gb": [["ZeRO 3", 31.5, [28.7, 30.1]]],
    }
    document = {**make_document(True, report_s=[1e-5]), "engine": engine, "before_repairs": ["`report()`"]}
    page = PAGE.render(document)
    assert "| plain | 100 ms | **101 ms** | 1.010 | yes | - | 20.5 GB |" in page
    assert "| ZeRO 3 | 100 ms | **121 ms** | 1.210 | **no** | - | 20.5 GB |" in page
    assert "The target is missed by: ZeRO 3." in page and "to be measured again: `report()`." in page
    assert "| ZeRO 3 | 31.5 GB | 28.7 to 30.1 GB | 1.05 to 1.10x |" in page


def test_page_says_where_the_loop_ran() -> None:
    assert "runs in a worker of a Trainer" in PAGE.render(make_document(True, report_s=[1e-5]))
    assert "in a process without Ray" in PAGE.render(make_document(False, report_s=[1e-5]))


def test_rows_show_series_of_the_measure() -> None:
    assert {row.series for row in PAGE.rows} <= GPU_STEP.units.keys()
    for system in GPU_STEP.systems:
        full, quick = (GPU_STEP.params(system, quick) for quick in (False, True))
        assert json.loads(json.dumps(full)).keys() == quick.keys()
