"""The page about the start of scripts: medians, ratios, and whether the targets are met."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from run_vs_torchrun import render


def times(*group: float) -> list[dict[str, float]]:
    return [{"line": value / 2, "group": value, "end": value + 1} for value in group]


@pytest.mark.parametrize(
    ("env", "cold"), [((6.0, 7.0, 90.0), "1.75 times as long: met"), ((9.0,) * 3, "2.25 times as long: **missed**")]
)
def test_page_has_medians_and_targets(env: tuple[float, ...], cold: str) -> None:
    machine: dict[str, Any] = {
        "cores": 2,
        "processor": "cpu",
        "memory_gib": 1.0,
        "versions": {"python": "3.12"},
    }
    samples = {
        "torchrun": times(4.0, 4.0, 1.0),
        "env": times(*env),
        "torch": times(5.0, 5.0, 6.0),
        "second": times(0.6, 0.5, 0.7),
    }
    page = render({"machine": machine, "measured": "2030-01-01", "load": 0.1, "samples": samples})
    assert "| `torchrun` | 2.00 s | 4.00 s | 5.00 s | 1.00 |" in page
    assert cold in page
    assert "It takes 0.120: **missed**." in page
