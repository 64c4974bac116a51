"""The simulated workers of the scale benchmark fit the controller's seam as it is now."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench.pages.scale import render
from bench.scale_simulated import measure
from scale import growth_of


async def test_simulated_run_is_measured_from_start_to_resize(tmp_path: Path) -> None:
    found = await measure(num_workers=3, seconds=1.0, folder=str(tmp_path), hz=10, save_every_s=0.3)
    assert found["workers"] == 3
    assert found["reports_per_s"] > 0 and found["messages_per_s"] > found["items_per_s"] > 0
    assert 0 < found["latency_p50_s"] <= found["latency_p99_s"]
    assert found["commits"] > 0 and found["commit_s"] >= found["commit_since_sent_s"] > 0
    assert 0 < found["death_to_order_s"] <= found["death_to_ready_s"] <= found["death_to_entered_s"]
    assert min(*found["start_per_worker_s"].values(), *found["resize_per_worker_s"].values()) > 0


def point(workers: int, cost: float) -> dict[str, float]:
    names = ("cpu_share", "messages_per_s", "memory_growth_mib", "cpu_per_report_s")
    return {"workers": workers, **dict.fromkeys(names, cost)}


def test_growth_is_given_from_one_worker_and_from_many() -> None:
    found = growth_of([point(1, 1.0), {"workers": 8, "error": "it broke"}, point(64, 8.0), point(1000, 125.0)])
    assert found["messages"] == {"1 to 1000": pytest.approx(0.699, abs=1e-3), "64 to 1000": pytest.approx(1.0)}
    assert growth_of([point(1, 1.0)]) == {}


def test_page_shows_targets_conclusion_and_failures() -> None:
    good = {**point(64, 0.5), "start_per_worker_s": {"form": 1e-4, "order": 2e-4}}
    failed = {"workers": 1000, "error": "it broke"}
    real = {"workers": 64, "cpu_share": 0.25, "save_to_commit_s": 0.75}
    document = {
        "machine": {"cores": 2, "processor": "x", "memory_gib": 8, "system": "Linux", "versions": {"python": "3.11"}},
        "measured": "2026-01-01", "load": 0.5, "quick": False, "verdict": "It grows.",
        "saving": [good, failed], "growth": {"messages": {"1 to 64": 0.5}}, "simulated": [good, failed],
        "real": failed, "real_saving": real,
        "trainers": {"trainers": 20, "workers": 5, "seconds": 40.0, "reports": 2000},
    }  # fmt: skip
    page = render(document)
    assert "| 64 | 50 % | - | 0.5 |" in page and "| 0.3 ms |" in page
    assert "| 1000 | failed: it broke |" in page
    assert "| target at 1,000 | 25 % | 500 MB |" in page
    assert "messages: 0.50 from 1 to 64 workers" in page and "It grows." in page
    assert "| 64 | 25 % | - | - | 0.75 s |" in page and "its own 100 reports" in page
