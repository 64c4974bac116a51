"""Results as JSON lines, read back by the readers people use."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import orjson
import pandas as pd
import pytest

from raysgd.callbacks import JsonLinesCallback
from raysgd.result import Result
from raysgd.testing.callback_suite import ODD_METRICS, bytes_written, drive, make_result, running


def write(run_dir: Path, *results: Result, callback: JsonLinesCallback | None = None) -> Path:
    with running(callback or JsonLinesCallback(), run_dir) as runner:
        for result in results:
            runner.call("on_result", result)
    return run_dir / "results.jsonl"


def test_pandas_reads_every_result(tmp_path: Path) -> None:
    results = [make_result(1, loss=0.5), make_result(2, loss=math.nan), make_result(3, loss=math.inf)]
    frame = pd.read_json(write(tmp_path, *results), lines=True)
    assert frame["training_iteration"].tolist() == [1, 2, 3]
    assert frame["loss"].dtype == float
    assert frame["loss"][0] == 0.5
    assert math.isnan(frame["loss"][1])
    assert math.isnan(frame["loss"][2])


def test_strict_readers_read_nan_and_infinities_as_null(tmp_path: Path) -> None:
    path = write(tmp_path, make_result(1, loss=math.nan), make_result(2, loss=math.inf, val={"loss": -math.inf}))
    first, second = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert first["loss"] is None and second["loss"] is None and second["val"] == {"loss": None}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_jq_reads_odd_metrics(tmp_path: Path) -> None:
    path = write(tmp_path, make_result(1, **ODD_METRICS))
    done = subprocess.run(["jq", "-c", "[.text, .nan, .nested.deep, .list]", path], capture_output=True, text=True)
    assert json.loads(done.stdout) == [ODD_METRICS["text"], None, {"value": 1, "nan": None}, [1, 2.5, None, None]]


def test_each_line_is_written_before_the_next_result(tmp_path: Path) -> None:
    with running(JsonLinesCallback(), tmp_path) as runner:
        for iteration in range(1, 4):
            runner.call("on_result", make_result(iteration))
            lines = (tmp_path / "results.jsonl").read_text().splitlines()
            assert [json.loads(line)["training_iteration"] for line in lines] == list(range(1, iteration + 1))


def test_repeated_results_are_kept_with_their_attempt(tmp_path: Path) -> None:
    rounds = [make_result(i, attempt=1, loss=1.0) for i in (1, 2, 3)]
    rounds += [make_result(i, attempt=2, loss=2.0) for i in (2, 3)]
    frame = pd.read_json(write(tmp_path, *rounds), lines=True)
    assert len(frame) == 5
    latest = frame.drop_duplicates("training_iteration", keep="last")
    assert latest.sort_values("training_iteration")["loss"].tolist() == [1.0, 2.0, 2.0]


def test_metrics_of_workers_are_written_if_enabled(tmp_path: Path) -> None:
    result = Result(make_result(1), workers=[{"loss": 1.0}, {"loss": 3.0}], ranks=(0, 2))
    path = write(tmp_path, result, callback=JsonLinesCallback(workers=True))
    line = json.loads(path.read_text())
    assert line["workers"] == [{"loss": 1.0}, {"loss": 3.0}]
    assert line["ranks"] == [0, 2]


def test_second_writer_appends_after_complete_lines(tmp_path: Path) -> None:
    path = write(tmp_path, make_result(1), make_result(2))
    path.write_text(path.read_text() + '{"training_iteration": 3, "lo')  # what a killed process left
    write(tmp_path, make_result(3), make_result(4))
    assert [json.loads(line)["training_iteration"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_file_is_never_rewritten(tmp_path: Path) -> None:
    # Defect of an earlier system: the whole file was written again with every result.
    if bytes_written() == 0:
        pytest.skip("this system does not count written bytes")
    callback, before = JsonLinesCallback(), bytes_written()
    drive(callback, tmp_path / "run", num_results=3000)
    written = bytes_written() - before
    assert written <= (tmp_path / "run" / "results.jsonl").stat().st_size + 10_000


def test_file_has_the_given_name(tmp_path: Path) -> None:
    write(tmp_path, make_result(1), callback=JsonLinesCallback("metrics.ndjson"))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.ndjson"]
