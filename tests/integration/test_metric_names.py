"""Names of metrics in real runs: flat and nested ones, and what a user learns of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.callbacks import EarlyStoppingCallback
from raysgd.errors import ConfigError, MissingMetricError
from raysgd.testing import check_history
from support.runs import latest_run, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


def train_func(config: dict[str, Any]) -> str:
    """Report a nested metric, and one that is in every third round only."""
    for step in range(config.get("steps", 4)):
        rank = raysgd.world_rank()
        rare = {"rare": step} if step % 3 == 2 else {}
        raysgd.report(loss=1.0 + rank, val={"acc": step + 2 * rank}, **rare)
        raysgd.save_checkpoint({"step": step})
    return f"value of rank {raysgd.world_rank()}"


def test_nested_metric_is_reduced_in_results_files_and_checkpoints(trainer: raysgd.Trainer) -> None:
    stream = trainer.run_generator(train_func, reduce={"val/acc": "mean", "rare": "max"}, callbacks=quiet())
    results = list(stream)
    assert [result["val"] for result in results] == [{"acc": 1}, {"acc": 2}, {"acc": 3}, {"acc": 4}]
    assert results[0].workers[1]["val"] == {"acc": 2}
    assert stream.get_returns() == "value of rank 0"  # `rare` is not in the first round, and came later

    run = latest_run(trainer)
    assert list(run.metrics["val/acc"]) == [1, 2, 3, 4]
    assert [tuple(row) for row in run.workers[["rank", "val/acc"]].to_numpy()[:4]] == [(0, 0), (1, 2), (0, 1), (1, 3)]
    best = trainer.get_best_checkpoint("val/acc", "min")
    assert best is not None and best.load() == {"step": 0} and best.metrics["val"] == {"acc": 1}


def test_name_that_never_comes_is_warned_about_and_the_value_returned(
    trainer: raysgd.Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stream = trainer.run_generator(train_func, reduce={"los": "mean", "loss": "mean"}, returns="all", callbacks=quiet())
    assert [result["loss"] for result in stream] == [1.5] * 4
    assert stream.get_returns() == ["value of rank 0", "value of rank 1"]
    newest = trainer.get_last_checkpoint()
    assert newest is not None and newest.load() == {"step": 3}
    run = latest_run(trainer)
    first, last = [text for text in run.warnings if "reduce=" in text]
    assert first.startswith("the reports of the first round have no 'los' (did you mean 'loss'?)")
    assert last.startswith("no report of the run had 'los' (did you mean 'loss'?)")
    assert trainer.run_info is not None and trainer.run_info.warnings == [first, last]
    assert {first, last} <= {record.getMessage() for record in caplog.records}
    assert run.outcome == "done" and list(run.metrics["loss"]) == [1.5] * 4
    check_history(str(trainer.run_dir))
    assert trainer.run(train_func, {"steps": 1}, callbacks=quiet()) == "value of rank 0"


def test_resumed_run_that_is_too_short_for_a_metric_warns_only(trainer: raysgd.Trainer) -> None:
    trainer.run(train_func, {"steps": 3}, callbacks=quiet())
    last = trainer.get_last_checkpoint()
    trainer.run(train_func, {"steps": 1}, resume_from=last, reduce={"rare": "max"}, callbacks=quiet())
    assert latest_run(trainer).warnings[-1].startswith("no report of the run had 'rare'")


def test_automatic_key_cannot_be_reduced(trainer: raysgd.Trainer) -> None:
    with pytest.raises(ConfigError, match="raysgd sets time_total_s itself"):
        trainer.run(train_func, reduce={"time_total_s": "mean"}, callbacks=quiet())


def test_early_stopping_by_an_unknown_metric_is_an_error_at_the_end(trainer: raysgd.Trainer) -> None:
    with pytest.raises(
        MissingMetricError, match=r"EarlyStoppingCallback did nothing.*did you mean 'val/acc'"
    ) as caught:
        trainer.run(train_func, callbacks=[*quiet(), EarlyStoppingCallback("accuracy")])
    assert caught.value.returned == "value of rank 0"
    assert any(text.startswith("the first result has no metric 'accuracy'") for text in latest_run(trainer).warnings)


def test_unknown_score_attribute_keeps_all_checkpoints_and_is_refused(ray_cluster: Any, tmp_path: Path) -> None:
    keeps = raysgd.CheckpointConfig(num_to_keep=1, score_attribute="val/accuracy")
    with make_trainer(tmp_path, 1, checkpoint_config=keeps) as trainer:
        assert trainer.get_best_checkpoint() is None
        trainer.run(train_func, callbacks=quiet())
        assert len(list((Path(str(trainer.run_dir)) / "checkpoints").iterdir())) == 4
        with pytest.raises(
            MissingMetricError, match=r"has no metric 'val/accuracy' \(did you mean 'val/acc'\?\); it has"
        ):
            trainer.get_best_checkpoint()
        best = trainer.get_best_checkpoint("val/acc")
        assert best is not None and best.load() == {"step": 3}
        (warning,) = latest_run(trainer).warnings
        assert warning.startswith("CheckpointConfig(score_attribute='val/accuracy'): checkpoint 1 has no metric")
