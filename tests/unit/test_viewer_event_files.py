"""TensorBoard's event files as runs of the page."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2

from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli.main import main
from raysgd.viewer.catalog import Catalog


def open_run(folder: Path, name: str) -> Any:
    (tmp := folder / "storage").mkdir(exist_ok=True)
    catalog = Catalog(Storage.from_uri(tmp), Storage.from_uri(folder))
    (found,) = (run for run in catalog.list_runs() if run["name"] == name)
    return found, catalog.open_run(found["id"])


def curves(answer: dict[str, Any]) -> dict[str, list[float]]:
    def decode(column: dict[str, str]) -> list[float]:
        return np.frombuffer(base64.b64decode(column["data"]), dtype=f"<{column['type']}").tolist()

    results = json.loads(json.dumps(answer, allow_nan=False))["results"]
    columns = {name: decode(column) for name, column in results["columns"].items()}
    return {"step": decode(results["iterations"]), **columns}


def test_scalars_are_curves_by_their_steps_and_grow(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "a" / "b")) as writer:
        for step in (0, 10, 20):
            writer.add_scalar("train/loss", 1.0 / (step + 1), step)
        writer.add_scalar("acc", math.nan, 10)
        writer.add_scalar("acc", 0.5, 20)
        writer.add_text("note", "left out", 20)
    listed, run = open_run(tmp_path, "a/b")
    assert (listed["state"], listed["iteration"], listed["metrics"]["acc"]) == ("live", 20, 0.5)
    first = run.read()
    found = curves(first)
    assert found["step"] == [0, 10, 20] and found["train/loss"] == pytest.approx([1, 1 / 11, 1 / 21])
    assert [str(value) for value in found["acc"]] == ["nan", "inf", "0.5"] and "note" not in found
    with SummaryWriter(str(tmp_path / "a" / "b"), filename_suffix=".more") as writer:
        writer.add_scalar("acc", 0.25, 0)  # of a row that is there, without its other metrics
        writer.add_scalar("train/loss", 9.0, 30)
    second = run.read(first["cursor"])
    assert second["results"]["from"] == 0 and curves(second)["step"] == [0, 10, 20, 30]
    assert curves(second)["acc"][0] == 0.25 and curves(second)["train/loss"][0] == 1.0
    assert "results" not in run.read(second["cursor"])


def test_hyperparameters_are_the_config(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_hparams({"lr": 0.1, "name": "adam", "is_big": True}, {"final": 1.0}, name="trial")
    listed, run = open_run(tmp_path, "run/trial")
    assert listed["config"] == {"lr": 0.1, "name": "adam", "is_big": True} and listed["metrics"] == {"final": 1.0}
    assert run.read()["facts"]["config"] == {"lr": "0.1", "name": "adam", "is_big": "true"}


def write_records(path: Path, *events: Any, cut: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = (event.SerializeToString() for event in events)
    data = b"".join(len(data).to_bytes(8, "little") + bytes(4) + data + bytes(4) for data in records)
    path.write_bytes(data[: len(data) - cut])


def tensor(step: int, value: np.ndarray[Any, Any], dtype: int) -> Any:
    content = tensor_pb2.TensorProto(dtype=dtype, tensor_content=value.tobytes())
    return event_pb2.Event(step=step, wall_time=100.0 + step, summary={"value": [{"tag": "loss", "tensor": content}]})


def test_tensors_restarts_large_records_and_files_that_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "tf2" / "events.out.tfevents.1.host.v2"
    image = summary_pb2.Summary.Image(encoded_image_string=bytes(9 << 20))
    picture = event_pb2.Event(step=1, summary={"value": [{"tag": "picture", "image": image}]})
    restart = event_pb2.Event(step=2, session_log={"status": 1})
    numbers = [tensor(step, np.float32([step + 0.5]), 1) for step in (1, 2, 3)]
    again = tensor(2, np.float64([7.0]), 2)
    write_records(path, numbers[0], picture, *numbers[1:], restart, again, tensor(3, np.float32([8.0]), 1), cut=5)
    listed, run = open_run(tmp_path, "tf2")
    assert listed["state"] == "unknown", "nothing says how it ended"
    answer = run.read(is_final=True)
    assert curves(answer)["step"] == [1, 2] and curves(answer)["loss"] == [1.5, 7.0]


def test_damaged_file_hides_no_other_run(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_scalar("loss", 1.0, 1)
    (path,) = (tmp_path / "bad").iterdir()
    path.write_bytes((3).to_bytes(8, "little") + bytes(4) + b"\xff\xff\xff" + bytes(4))
    catalog = Catalog(Storage.from_uri(tmp_path / "none"), Storage.from_uri(tmp_path))
    assert {run["name"]: run["state"] for run in catalog.list_runs()} == {"good": "live", "bad": "unreadable"}


def test_folder_of_event_files_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", str(tmp_path), "--tensorboard", str(tmp_path / "missing")]) == 2
    assert "missing is not a folder on this machine; give one with event files" in capsys.readouterr().err
