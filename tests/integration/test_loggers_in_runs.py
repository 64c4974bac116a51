"""MLflow, W&B and the torch profiler in runs of a Trainer: one that succeeds, one that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.callbacks import MLflowCallback, TorchProfilerCallback, WandbCallback
from support.runs import events_of, make_trainer, quiet, travels_by_value
from support.wandb_files import exit_codes, read, rows, updates

pytestmark = pytest.mark.shared_trainer
tracking = pytest.importorskip("mlflow.tracking")
pytest.importorskip("wandb")
travels_by_value(__name__)


@pytest.fixture(scope="module")
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        request.getfixturevalue("ray_cluster")
        with make_trainer(tmp_path_factory.mktemp("runs"), 2, "torch") as trainer:
            yield trainer


def train_func(config: dict[str, Any]) -> str:
    import torch

    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    for step in range(config["steps"]):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        raysgd.report(step=step, loss=loss)
    raysgd.barrier()  # all ranks made all reports
    if config["fails"]:
        raise ValueError("loss is nan")
    return "done"


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_mlflow_wandb_and_profiler_record_a_run(trainer: raysgd.Trainer, fails: bool) -> None:
    loggers = [MLflowCallback(), WandbCallback(mode="offline"), TorchProfilerCallback(ranks=(0, 1))]
    config = {"steps": 6, "fails": fails}
    if fails:
        with pytest.raises(ValueError, match="loss is nan"):
            trainer.run(train_func, config, callbacks=[*quiet(), *loggers])
    else:
        assert trainer.run(train_func, config, callbacks=[*quiet(), *loggers]) == "done"
    warnings = [event["message"] for event in events_of(trainer, "warning")]
    assert [each for each in warnings if "callback" in each and "waits for its callbacks" not in each] == []
    run_dir = Path(str(trainer.run_dir))

    client = tracking.MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    experiment = client.get_experiment_by_name(run_dir.parent.name)
    (run,) = client.search_runs([experiment.experiment_id], f'tags.`raysgd.run_dir` = "{run_dir}"')
    assert run.info.status == ("FAILED" if fails else "FINISHED")
    assert run.data.params["steps"] == "6"
    assert run.data.tags.get("raysgd.error") == ("ValueError: loss is nan" if fails else None)
    history = client.get_metric_history(run.info.run_id, "step")
    assert sorted((metric.step, metric.value) for metric in history) == [(i + 1, i) for i in range(6)]

    records = read(run_dir)
    assert exit_codes(records) == [int(fails)]
    assert updates(records, "summary").get("error") == ("ValueError: loss is nan" if fails else None)
    assert [row["step"] for row in rows(records)] == list(range(6))

    for rank in (0, 1):
        (trace,) = (run_dir / f"profiler/rank_{rank}").glob("*.pt.trace.json")
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert any("addmm" in str(name) for name in names)
