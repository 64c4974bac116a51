"""What MLflow has of a run, asked through its own client."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import MLflowCallback
from raysgd.callbacks.runner import CallbackRunner
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.errors import RunCancelledError
from raysgd.result import Event, RunInfo
from raysgd.testing.callback_suite import drive, make_info, make_result, running

tracking = pytest.importorskip("mlflow.tracking")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"  # making one takes seconds


@pytest.fixture(autouse=True)
def _no_store_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def runs_of(store: str, experiment: str) -> list[Any]:
    client = tracking.MlflowClient(store)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def history(store: str, run: Any, metric: str) -> list[tuple[int, float]]:
    found = tracking.MlflowClient(store).get_metric_history(run.info.run_id, metric)
    return sorted((metric.step, metric.value) for metric in found)


def test_params_metrics_and_status_are_logged(store: str, tmp_path: Path) -> None:
    callback = MLflowCallback("logged", store, run_name="first", tags={"team": "a"})
    with running(callback, tmp_path / "run") as runner:
        for iteration in range(1, 4):
            runner.call("on_result", make_result(iteration, val={"acc@5": iteration}, text="x"))
        runner.call("on_checkpoint", Checkpoint("s3://bucket/3", iteration=3))
    (run,) = runs_of(store, "logged")
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.001"
    assert run.data.params["optimizer"] == "adam"
    assert run.data.params["nested/dropout"] == "null"
    assert run.data.tags["team"] == "a"
    assert run.data.tags["raysgd.last_checkpoint"] == "s3://bucket/3"
    assert history(store, run, "loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert history(store, run, "val/acc_5") == [(1, 1), (2, 2), (3, 3)]
    assert "text" not in run.data.metrics


def test_mlflow_run_begins_and_ends_when_the_run_does(store: str, tmp_path: Path) -> None:
    callback = MLflowCallback("times", store)
    callback.on_run_start(replace(make_info(tmp_path / "run"), started_s=1_700_000_000.25))
    callback.on_event(Event("run_end", 1_700_000_007.5, {"kind": "done", "message": ""}))
    callback.on_run_end(None)
    (run,) = runs_of(store, "times")
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_250, 1_700_000_007_500)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("loss is nan"), "FAILED"),
        (RunCancelledError("cancelled"), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
def test_failed_or_cancelled_run_has_its_mlflow_status(
    error: BaseException, status: str, store: str, tmp_path: Path
) -> None:
    # Defect of an earlier system: runs that crashed were marked as finished.
    experiment = f"failed_{type(error).__name__}"
    drive(MLflowCallback(experiment, store), tmp_path / "run", error=error)
    (run,) = runs_of(store, experiment)
    assert run.info.status == status
    assert run.data.tags["raysgd.error"].startswith(type(error).__name__)
    assert len(history(store, run, "loss")) == 5


def test_second_writer_continues_the_same_mlflow_run(store: str, tmp_path: Path) -> None:
    for iterations in (range(1, 4), range(3, 6)):
        with running(MLflowCallback("restored", store), tmp_path / "it's a run") as runner:
            for iteration in iterations:
                runner.call("on_result", make_result(iteration, nan=math.nan))
    (run,) = runs_of(store, "restored")
    assert run.info.status == "FINISHED"
    assert {step for step, _ in history(store, run, "loss")} == {1, 2, 3, 4, 5}


def test_two_runs_are_two_mlflow_runs(store: str, tmp_path: Path) -> None:
    callback = MLflowCallback("two", store)
    drive(callback, tmp_path / "run_1", num_results=3)
    drive(callback, tmp_path / "run_2", num_results=2)
    lengths = {run.info.run_name: len(history(store, run, "loss")) for run in runs_of(store, "two")}
    assert lengths == {"run_1": 3, "run_2": 2}


def test_default_store_is_next_to_the_run_folder(store: str, tmp_path: Path) -> None:
    tracking.MlflowClient(store).search_experiments()
    (tmp_path / "digits").mkdir()
    shutil.copy(store.removeprefix("sqlite:///"), tmp_path / "digits" / "mlflow.db")  # quicker than a new one
    drive(MLflowCallback(), tmp_path / "digits" / "run_001")
    (run,) = runs_of(f"sqlite:///{tmp_path}/digits/mlflow.db", "digits")
    assert run.info.run_name == "run_001"


def test_the_store_of_the_drivers_environment_is_used(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    callback = MLflowCallback("from_environment")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the controller's process does not have it
    drive(callback, tmp_path / "run")
    assert len(runs_of(store, "from_environment")) == 1


def test_a_run_on_an_object_store_needs_a_tracking_store() -> None:
    problems: list[str] = []
    CallbackRunner([MLflowCallback()], problems.append).start(RunInfo("run", "s3://bucket/t/run", {}, 1, "none"))
    assert "give MLflowCallback(tracking_uri=...)" in problems[0]


def test_half_of_a_surrogate_pair_is_logged_by_its_number(store: str, tmp_path: Path) -> None:
    callback = MLflowCallback("surrogates", store)
    callback.on_run_start(replace(make_info(tmp_path), config={"file": "\udcff.txt"}))
    callback.on_run_end(ValueError("\udcff.txt is broken"))
    (run,) = runs_of(store, "surrogates")
    assert run.data.params == {"file": r"\udcff.txt"}
    assert run.data.tags["raysgd.error"] == r"ValueError: \udcff.txt is broken"


def test_long_and_many_params_are_logged(store: str, tmp_path: Path) -> None:
    config = {f"p{number}": "x" * 2000 for number in range(150)}
    callback = MLflowCallback("params", store)
    callback.on_run_start(RunInfo("run", str(tmp_path / "run"), config, 1, "none"))
    callback.on_run_end(None)
    (run,) = runs_of(store, "params")
    assert len(run.data.params) == 150
    assert len(run.data.params["p0"]) == 500


def test_failed_batch_is_sent_again(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback, problems = MLflowCallback("outage", store), list[str]()
    runner = CallbackRunner([callback], problems.append)
    runner.start(make_info(tmp_path / "run"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(tracking.MlflowClient, "log_batch", refuse)
        runner.call("on_result", make_result(1))
        runner.call("on_result", make_result(2))
    runner.call("on_event", Event("sample", 0.0))
    runner.end(None)
    assert ["no route to host" in text for text in problems] == [True]
    (run,) = runs_of(store, "outage")
    assert history(store, run, "loss") == [(1, 1.0), (2, 0.5)]
