"""The rows of the table of runs: what changed since the last time, ranges of metrics, and values of any config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.storage.storage import Storage
from raysgd.viewer.catalog import Catalog, RunTable
from raysgd.viewer.rows import as_values
from support.journals import WrittenRun

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_any_config_is_values_that_a_browser_reads(config: Any) -> None:
    values = as_values(config)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert all(value is None or isinstance(value, (bool, int, float, str)) for value in values.values())


def test_numbers_that_are_not_finite_keep_their_names() -> None:
    found = as_values(
        {"optimizer": {"lr": 0.1}, "limit": math.inf, "none": None, "layers": [1, 2], "on": True, "a/b": "x"}
    )
    assert found == {"optimizer.lr": 0.1, "limit": "Infinity", "none": None, "layers": "[1, 2]", "on": True, "a.b": "x"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, losses in enumerate([(3.0, 1.0, 2.0), (math.nan, 5.0, math.nan)], 1):
        run = WrittenRun(tmp_path / "exp" / f"run_{number:03d}", config={"lr": number / 10})
        run.begin_attempt([number])
        run.report(*({"loss": loss, "note": "x"} for loss in losses))
        run.end()
    return tmp_path


def test_only_rows_that_changed_are_sent_again(folder: Path) -> None:
    table = RunTable(Catalog(Storage.from_uri(folder)))
    first = table.read()
    assert len(first["runs"]) == len(first["ids"]) == 2
    again = table.read(first["version"])
    assert again["runs"] == [] and again["ids"] == first["ids"] and again["version"] == first["version"]
    new = WrittenRun(folder / "exp" / "run_003")
    new.end()
    changed = table.read(first["version"])
    assert [row["name"] for row in changed["runs"]] == ["exp/run_003"] and len(changed["ids"]) == 3
    assert len(table.read()["runs"]) == 3, "a page that is loaded again gets all"


def test_rows_have_the_lowest_and_highest_values_when_asked(folder: Path) -> None:
    table = RunTable(Catalog(Storage.from_uri(folder)))
    assert [row["ranges"] for row in table.read()["runs"]] == [{}, {}]
    answer = table.read(with_ranges=True)
    ranges = {row["name"]: row["ranges"]["loss"] for row in answer["runs"]}
    assert ranges == {"exp/run_001": [1.0, 3.0], "exp/run_002": [5.0, 5.0]} and answer["num_unread"] == 0
    assert {row["name"]: row["metrics"]["loss"] for row in answer["runs"]} == {"exp/run_001": 2.0, "exp/run_002": "NaN"}


def test_run_that_cannot_be_read_is_a_row(folder: Path) -> None:
    (folder / "exp" / "run_001" / "events.jsonl").write_text("not JSON\n")
    answer = RunTable(Catalog(Storage.from_uri(folder))).read(with_ranges=True)
    assert sorted(row["state"] for row in answer["runs"]) == ["done", "unreadable"]


def test_row_of_a_trial_names_the_checkpoint_that_it_continues(folder: Path) -> None:
    run = WrittenRun(folder / "search" / "trial_b" / "run_002", config={"lr": 0.5})
    run.begin_attempt([7], iterations_before=6, checkpoint=f"{folder}/search/trial_a/checkpoint_000003")
    run.end("cancelled", message="the search ended this trial")
    row = next(row for row in RunTable(Catalog(Storage.from_uri(folder))).read()["runs"] if "trial_b" in row["name"])
    assert row["first"] == 6 and row["why"] == "the search ended this trial"
    assert row["source"].endswith("search/trial_a/checkpoint_000003")
