"""The simulated workers of the scale benchmark fit the controller's seam as it is now."""

from __future__ import annotations

import sys
from pathlib import Path

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench.scale_simulated import measure


async def test_simulated_run_delivers_all_reports(tmp_path: Path) -> None:
    found = await measure(num_workers=3, seconds=0.3, folder=str(tmp_path))
    assert found["workers"] == 3
    assert found["reports_per_s"] > 0
    assert 0 < found["latency_p50_s"] <= found["latency_p99_s"]
