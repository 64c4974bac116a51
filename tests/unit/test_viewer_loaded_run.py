"""How a loaded run prints."""

from __future__ import annotations

import html
import math
import xml.etree.ElementTree as ET
from typing import Any

import pandas as pd

from raysgd.viewer.loaded_run import MAX_METRICS, LoadedRun

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
        "metric    first   last   lowest   highest",
        "-----------------------------------------",
        "loss       0.93    0.5   0.1235      0.93",
        "val/acc    0.25   0.25     0.25      0.25",
        "tables: .metrics .workers .events .samples; also .config .description .checkpoints",
    ]


def test_run_without_results_prints_what_is_known() -> None:
    text = repr(loaded({}, outcome=None, description={}, events=EVENTS[:0]))
    assert text.startswith("run_003: live, or lost, 0 iterations, 0 checkpoints\n")


def test_many_metrics_are_counted_and_secrets_left_out() -> None:
    many = {f"m{number}": [1.0] for number in range(MAX_METRICS + 5)}
    run = loaded(many, run_dir="s3://key:secret@bucket/a/run_001")
    assert "and 5 more metrics" in repr(run) and "and 5 more" in run._repr_html_()
    assert "secret" not in repr(run) + run._repr_html_()


def test_notebook_shows_a_curve_for_each_metric() -> None:
    page = loaded({"loss": [3.0, 2.0, 1.0], "<b>": [1.0, math.inf, 2.0], "note": ["a", "b", "c"]})._repr_html_()
    lines = html.unescape("".join(ET.fromstring(page).itertext())).splitlines()
    assert lines[0] == "run_003: done, 3 iterations, 2 x torch worker, 0 checkpoints, 1 warning"
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["loss"] == ["3.0", "1.0", "1.0", "3.0", "█▅▁"]
    assert rows["<b>"] == ["1.0", "2.0", "1.0", "2.0", "▁█"] and "note" not in rows
    assert "<b>" not in page
    assert repr(loaded({"loss": [3.0, 2.0]})).isascii()
