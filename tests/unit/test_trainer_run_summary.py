"""How a loaded run prints."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pandas as pd

from raysgd.trainer.run_folder import LoadedRun
from raysgd.trainer.run_summary import MAX_METRICS, MAX_POINTS, curve

EVENTS = pd.DataFrame({"timestamp": [1.0] * 3, "kind": ["run_start", "warning", "run_end"], "data": [{}] * 3})


def loaded(metrics: dict[str, Any], **changes: Any) -> LoadedRun:
    given: dict[str, Any] = {
        "run_dir": "/runs/digits/run_003",
        "metrics": pd.DataFrame(metrics),
        "workers": pd.DataFrame(),
        "events": EVENTS,
        "samples": pd.DataFrame(),
        "config": {},
        "description": {"num_workers": 2, "backend": "torch"},
        "outcome": "done",
    }
    return LoadedRun(**{**given, **changes})


def test_loaded_run_prints_as_a_short_summary() -> None:
    rounds = {"training_iteration": [1, 2, 3], "time_total_s": [1.0, 2.0, 67.0], "world_size": [2, 2, 2]}
    metrics = {"loss": [0.93, 0.123456, 0.5], "val/acc": [math.nan, 0.25, math.nan], "note": ["a", "b", "c"], **rounds}
    assert repr(loaded(metrics)).splitlines() == [
        "run_003: done, 3 iterations in 1:07, 2 x torch worker, 0 checkpoints, 1 warning",
        "in /runs/digits/run_003",
        "  metric   first  last  lowest  highest",
        "  loss      0.93   0.5  0.1235     0.93",
        "  val/acc   0.25  0.25    0.25     0.25",
        "tables: .metrics .workers .events .samples; also .config .description .checkpoints",
    ]


def test_run_without_results_prints_what_is_known() -> None:
    text = repr(loaded({}, outcome=None, description={}, events=EVENTS[:0]))
    assert text.startswith("run_003: live, or lost, 0 iterations, 0 checkpoints\n")


def test_many_metrics_are_counted_and_secrets_left_out() -> None:
    many = {f"m{number}": [1.0] for number in range(MAX_METRICS + 5)}
    run = loaded(many, run_dir="s3://key:secret@bucket/a/run_001")
    assert "  and 5 more metrics" in repr(run) and "and 5 more" in run._repr_html_()
    assert "secret" not in repr(run) + run._repr_html_()


def test_notebook_shows_a_curve_for_each_metric() -> None:
    page = loaded({"loss": [3.0, 2.0, 1.0], "<b>": [1.0, math.inf, 2.0]})._repr_html_()
    assert "<caption>run_003: done, 3 iterations, 2 x torch worker" in page
    assert page.count("<svg") == 2 and "<b>" not in page and "&lt;b&gt;" in page
    ET.fromstring(page.replace("<br>", "<br/>"))


def test_curve_falls_with_the_values_and_stays_in_its_picture() -> None:
    def places(values: list[float]) -> list[tuple[float, float]]:
        (points,) = re.findall(r'points="([^"]*)"', curve(values))
        return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]

    falling = places([9.0, 4.0, 1.0])
    assert [x for x, _ in falling] == sorted(x for x, _ in falling)
    assert [y for _, y in falling] == sorted(y for _, y in falling)  # SVG counts from the top
    for values in ([1.0] * 5, list(map(float, range(10_000))), [1e300, -1e300]):
        found = places(values)
        assert 2 <= len(found) <= MAX_POINTS
        assert all(0 <= x <= 160 and 0 <= y <= 28 for x, y in found)
    assert "<circle" in curve([1.0])
