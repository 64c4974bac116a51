"""Results as CSV, read back by the readers people use."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pandas as pd
import pytest

from raysgd.callbacks import CsvCallback
from raysgd.result import Result
from raysgd.testing.callback_suite import ODD_METRICS, bytes_written, make_result, running


def write(run_dir: Path, *results: Result, callback: CsvCallback | None = None) -> Path:
    with running(callback or CsvCallback(), run_dir) as runner:
        for result in results:
            runner.call("on_result", result)
    return run_dir / "results.csv"


def test_pandas_reads_numbers_from_csv(tmp_path: Path) -> None:
    results = [make_result(1, loss=0.1), make_result(2, loss=math.nan), make_result(3, loss=-math.inf)]
    frame = pd.read_csv(write(tmp_path, *results))
    assert frame["training_iteration"].tolist() == [1, 2, 3]
    assert frame["loss"][0] == 0.1
    assert math.isnan(frame["loss"][1])
    assert frame["loss"][2] == -math.inf


def test_iteration_and_attempt_come_first_then_the_users_metrics(tmp_path: Path) -> None:
    header = write(tmp_path, make_result(1, val={"acc": 1})).read_text().splitlines()[0]
    assert header.startswith("training_iteration,attempt,loss,val/acc,")


def test_metrics_that_are_new_or_missing_have_a_column(tmp_path: Path) -> None:
    results = [make_result(1), make_result(2, acc=0.5), make_result(3), make_result(4, acc=0.7, lr=0.1)]
    frame = pd.read_csv(write(tmp_path, *results))
    assert frame["training_iteration"].tolist() == [1, 2, 3, 4]
    assert frame["acc"].fillna(-1).tolist() == [-1, 0.5, -1, 0.7]
    assert frame["lr"].fillna(-1).tolist() == [-1, -1, -1, 0.1]
    assert frame["loss"].tolist() == [1.0, 0.5, pytest.approx(1 / 3), 0.25]


def test_unusual_values_are_written_in_one_row_each(tmp_path: Path) -> None:
    path = write(tmp_path, make_result(1, **ODD_METRICS), make_result(2))
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(path.read_text(encoding="utf-8").splitlines()) - 1 == 2
    assert rows[0]["text"] == 'two\\nlines, "quoted" | ünïcödé'
    assert json.loads(rows[0]["list"]) == [1, 2.5, None, None]
    assert rows[0]["nested/deep/value"] == "1"
    assert rows[0]["none"] == rows[1]["text"] == ""


def test_second_writer_appends_under_the_same_columns(tmp_path: Path) -> None:
    path = write(tmp_path, make_result(1, acc=0.5))
    path.write_text(path.read_text() + "2,1,0.5")  # what a killed process left
    frame = pd.read_csv(write(tmp_path, make_result(2), make_result(3, acc=0.7, lr=0.1)))
    assert frame["training_iteration"].tolist() == [1, 2, 3]
    assert frame["acc"].fillna(-1).tolist() == [0.5, -1, 0.7]


def test_repeated_results_are_kept_with_their_attempt(tmp_path: Path) -> None:
    rounds = [make_result(1), make_result(2), make_result(2, attempt=2)]
    frame = pd.read_csv(write(tmp_path, *rounds))
    assert frame[["training_iteration", "attempt"]].to_numpy().tolist() == [[1, 1], [2, 1], [2, 2]]


def test_new_column_rewrites_the_file_once(tmp_path: Path) -> None:
    if bytes_written() == 0:
        pytest.skip("this system does not count written bytes")
    results = [make_result(i, **({"late": 1} if i > 2000 else {})) for i in range(1, 3001)]
    before = bytes_written()
    path = write(tmp_path, *results)
    assert bytes_written() - before <= 2 * path.stat().st_size + 10_000


def test_columns_are_bounded_and_one_warning_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = [make_result(i, **{f"m{i}": i}) for i in range(1, 30)]
    frame = pd.read_csv(write(tmp_path, *results, callback=CsvCallback(max_columns=12)))
    (record,) = caplog.records
    assert "has 12 columns; further metrics are left out" in record.getMessage()
    assert frame.shape == (29, 12)
    assert frame["m1"][0] == 1


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    write(tmp_path, make_result(1), make_result(2, acc=1), make_result(3, lr=1))
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_long_lists_and_odd_names_survive_a_new_column(tmp_path: Path) -> None:
    curve = [1 / (3 + place) for place in range(16_000)]  # longer than csv reads by default
    odd = {"a,b": 1, 'say "x"': 2, "two\nlines": 3, "": 4, "é": 5, "x" * 300: 6}
    path = write(tmp_path, *(make_result(i, curve=curve, odd=odd) for i in (1, 2)), make_result(3, late=7, odd=odd))
    frame = pd.read_csv(path)
    assert frame["training_iteration"].tolist() == [1, 2, 3]
    assert [json.loads(text) for text in frame["curve"][:2]] == [curve, curve]
    assert frame["late"].fillna(-1).tolist() == [-1, -1, 7]
    for name, value in odd.items():
        assert frame["odd/" + name.replace("\n", "\\n")].tolist() == [value] * 3
