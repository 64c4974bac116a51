"""The comparison of two checkouts: medians, their ratio, and a table for a page."""

from __future__ import annotations

import sys
from typing import Any

import pandas as pd

from support.project import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from compare_checkouts import compare, to_markdown


def samples(checkout: str, *values: float) -> list[dict[str, Any]]:
    row = {"measure": "start", "series": "cold_s", "unit": "s", "checkout": checkout}
    return [{**row, "value": value} for value in values]


def test_medians_of_two_checkouts_are_compared() -> None:
    table = compare(pd.DataFrame([*samples("before", 1.0, 2.0, 3.0), *samples("after", 1.0, 9.0, 1.0)]))
    row = table.loc[("start", "cold_s", "s")]
    assert (row.before, row.after, row.ratio, row.spread, row.samples) == (2.0, 1.0, 0.5, 0.5, 3)
    assert to_markdown(table).splitlines()[-1] == "| start | cold_s | 2 s | 1 s | 0.500 | ±25.0% | 3 |"
