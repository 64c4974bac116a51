"""What W&B would be sent of a run, read from the file of an offline run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raysgd.callbacks import WandbCallback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.result import RunInfo
from raysgd.testing.callback_suite import ODD_METRICS, drive, make_result, running
from support.wandb_files import exit_codes, read, records, rows, updates

wandb = pytest.importorskip("wandb")
fsspec = pytest.importorskip("fsspec")


@pytest.fixture(scope="module", autouse=True)
def _service() -> Iterator[None]:
    yield
    wandb.teardown()  # it outlives its runs


def test_config_and_results_are_logged(tmp_path: Path) -> None:
    with running(WandbCallback(mode="offline", tags=["a"]), tmp_path / "digits" / "run_001") as runner:
        for iteration in range(1, 4):
            runner.call("on_result", make_result(iteration, **ODD_METRICS))
        runner.call("on_checkpoint", Checkpoint("s3://bucket/3", iteration=3))
    found = read(tmp_path / "digits" / "run_001")
    logged = rows(found)
    assert [row["training_iteration"] for row in logged] == [1, 2, 3]
    assert [row["loss"] for row in logged] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert logged[0]["nested/deep/value"] == 1
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, list(run.tags)) == ("digits", "run_001", ["a"])
    assert updates(found, "config")["lr"] == 0.001
    assert updates(found, "summary")["last_checkpoint"] == "s3://bucket/3"
    assert exit_codes(found) == [0]


def test_the_iteration_is_the_axis_of_every_metric(tmp_path: Path) -> None:
    drive(WandbCallback(mode="offline"), tmp_path / "run", num_results=2)
    metrics = [record.metric for record in read(tmp_path / "run") if record.WhichOneof("record_type") == "metric"]
    assert ("*", "training_iteration") in [(metric.glob_name, metric.step_metric) for metric in metrics]


def test_failed_run_exits_with_one_and_its_error(tmp_path: Path) -> None:
    # Defect of an earlier system: runs that crashed were marked as finished.
    drive(WandbCallback(mode="offline"), tmp_path / "run", error=ValueError("loss is nan"))
    found = read(tmp_path / "run")
    assert exit_codes(found) == [1]
    assert updates(found, "summary")["error"] == "ValueError: loss is nan"


def test_repeated_results_are_logged_with_their_attempt(tmp_path: Path) -> None:
    with running(WandbCallback(mode="offline"), tmp_path / "run") as runner:
        for iteration, attempt in ((1, 1), (2, 1), (1, 2), (2, 2)):
            runner.call("on_result", make_result(iteration, attempt))
    logged = rows(read(tmp_path / "run"))
    assert [(row["training_iteration"], row["attempt"]) for row in logged] == [(1, 1), (2, 1), (1, 2), (2, 2)]


def test_arguments_of_init_override(tmp_path: Path) -> None:
    drive(WandbCallback("mine", mode="offline", name="other", id="abc123"), tmp_path / "run")
    (run,) = [record.run for record in read(tmp_path / "run") if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_id) == ("mine", "other", "abc123")


def test_another_run_of_this_process_is_left_alone(tmp_path: Path) -> None:
    other = wandb.init(mode="offline", dir=tmp_path, project="other", settings=wandb.Settings(silent=True))
    try:
        drive(WandbCallback(mode="offline"), tmp_path / "run")
        other.log({"still": 1})
    finally:
        other.finish()


def test_an_offline_run_gets_to_an_object_store_whole() -> None:
    memory = fsspec.filesystem("memory")
    callback = WandbCallback(mode="offline")
    callback.on_run_start(RunInfo("run", "fsspec+memory://wandb-runs/trainer/run", {}, 1, "none"))
    callback.on_result(make_result(1))
    callback.on_run_end(None)
    (file,) = [name for name in memory.find("/wandb-runs/trainer/run/wandb") if name.endswith(".wandb")]
    assert exit_codes(records(memory.cat(file))) == [0]
    memory.rm("/wandb-runs", recursive=True)
