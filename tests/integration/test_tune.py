"""Trials of Ray Tune that are raysgd runs: real searches, with real schedulers, on a real cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune
from ray.experimental import internal_kv

import raysgd
from raysgd.errors import ConfigError, InfeasibleError, TrainerBusyError
from raysgd.tune_integration import trial_resources
from raysgd.workers.placement.cluster import NAMESPACE
from support.poll import until
from support.runs import PATIENCE_S, is_alive, travels_by_value
from support.searches import Fit, Reported, column, counts

travels_by_value(__name__)
travels_by_value("support.searches")
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_leftovers_of_trials")]


def test_grid_search_runs_all_trials(fit: Fit) -> None:
    grid = fit(raysgd.Trainer(2, "none").to_trainable(counts), {"lr": tune.grid_search([1.0, 3.0])})
    assert [(result.config["lr"], result.error) for result in grid] == [(1.0, None), (3.0, None)]
    for result in grid:
        lr = result.config["lr"]
        assert column(result, "training_iteration") == column(result, "step") == [1, 2, 3]
        assert column(result, "weight") == [lr, 2 * lr, 3 * lr]
        assert raysgd.load_checkpoint(result.checkpoint.path) == {"step": 3, "weight": 3 * lr}
        kept = [(metrics["training_iteration"], metrics["step"]) for _, metrics in result.best_checkpoints]
        assert kept == [(1, 1), (2, 2), (3, 3)]
        run = raysgd.load_run(f"{result.path}/run_001")
        assert sorted(zip(run.workers["rank"], run.workers["step"], strict=True)) == [
            (rank, step) for rank in (0, 1) for step in (1, 2, 3)
        ]
        assert run.checkpoints[-1].iteration == 3
    best = grid.get_best_result("weight", "max")
    assert best.metrics["weight"] == 9.0


def test_tune_run_next_to_a_warm_trainer(ray_cluster: Any, tmp_path: Path) -> None:
    run = raysgd.RunConfig(storage_path=tmp_path / "own")
    with raysgd.Trainer(2, "none", cpus_per_worker=4, run_config=run) as trainer:
        assert trainer.run(lambda: "warm", callbacks=[raysgd.callbacks.ProgressCallback(mode="off")]) == "warm"
        analysis = tune.run(
            trainer.to_trainable(counts), config={"lr": 2.0}, num_samples=1, storage_path=str(tmp_path), verbose=0
        )
        (trial,) = analysis.trials
        assert raysgd.load_checkpoint(trial.checkpoint.path) == {"step": 3, "weight": 6.0}
        assert trial.last_result["training_iteration"] == 3
        assert trainer.run(lambda: "again", callbacks=[raysgd.callbacks.ProgressCallback(mode="off")]) == "again"


def test_live_trainer_is_not_convertible(ray_cluster: Any, tmp_path: Path) -> None:
    with raysgd.Trainer(1, "none", run_config=raysgd.RunConfig(storage_path=tmp_path)) as trainer:
        stream = trainer.run_generator(
            lambda: time.sleep(600), callbacks=[raysgd.callbacks.ProgressCallback(mode="off")]
        )
        with pytest.raises(TrainerBusyError):
            trainer.to_trainable(counts)
        stream.cancel()


def test_processes_of_a_trial_are_reused(fit: Fit) -> None:
    trainable = raysgd.Trainer(2, "none").to_trainable(counts)
    space = {"lr": tune.grid_search([1.0, 2.0, 3.0])}
    grid = fit(trainable, space, reuse_actors=True, max_concurrent_trials=1)
    assert len({result.metrics["worker"] for result in grid}) == 1
    assert noted_of_ends(trainable) != b"advised"
    assert [column(result, "weight") for result in grid] == [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [3.0, 6.0, 9.0]]
    assert [column(result, "training_iteration") for result in grid] == [[1, 2, 3]] * 3
    assert {result.path for result in grid} == {str(Path(result.checkpoint.path).parent) for result in grid}


def test_reuse_is_advised_where_it_would_pay(fit: Fit) -> None:
    trainable = raysgd.Trainer(1, "none").to_trainable(counts)
    fit(trainable, {"lr": tune.grid_search([1.0, 2.0])}, reuse_actors=False, max_concurrent_trials=1)
    assert noted_of_ends(trainable) == b"advised"


def noted_of_ends(trainable: Any) -> Any:
    """Return what a search has noted of trials whose processes have ended."""
    return internal_kv._internal_kv_get(f"search/{trainable._recipe.work.hex()}", namespace=NAMESPACE)


def test_dead_worker_is_replaced_within_its_trial(fit: Fit, tmp_path: Path) -> None:
    trainer = raysgd.Trainer(2, "none", failure_config=raysgd.FailureConfig(max_failures=1))
    (result,) = fit(trainer.to_trainable(counts), {"steps": 6, "dies_at": 3, "mark": str(tmp_path / "mark")})
    assert result.error is None
    assert column(result, "training_iteration") == column(result, "step") == [1, 2, 3, 4, 5, 6]
    assert result.metrics["attempt"] == 2
    assert raysgd.load_checkpoint(result.checkpoint.path)["step"] == 6


class Diverged(Exception):
    pass


def test_failed_trials_do_not_affect_other_trials(fit: Fit) -> None:
    def train_func(config: dict[str, Any]) -> None:
        raysgd.report(step=1)
        if config["n"] == 0:
            raise Diverged("loss is nan")

    grid = fit(raysgd.Trainer(1, "none").to_trainable(train_func), {"n": tune.grid_search([0, 1])})
    assert [result.error is not None for result in grid] == [True, False]
    (failed,) = grid.errors
    assert isinstance(failed, Diverged) or "Diverged: loss is nan" in str(failed)
    assert "in the worker of rank" in Path(grid[0].path, "error.txt").read_text()
    assert column(grid[0], "step") == [1]


class Hooks(raysgd.Callback):
    """Writes each result to a file in the run's folder."""

    def on_run_start(self, info: Any) -> None:
        self.path = Path(info.run_dir, "hooks.txt")

    def on_result(self, result: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{result['weight']}\n")


def saves_first(config: dict[str, Any]) -> None:
    state = raysgd.load_checkpoint() or {"step": 0, "weight": 0.0}
    for step in range(state["step"] + 1, 4):
        raysgd.save_checkpoint({"step": step, "weight": float(step)})
        time.sleep(config["evaluates_s"])
        raysgd.report(step=step, weight=float(step) + raysgd.world_rank())


def test_checkpoint_saved_before_its_report_gets_that_round(fit: Fit, tmp_path: Path) -> None:
    start = fit(raysgd.Trainer(1, "none").to_trainable(counts), {"steps": 1})[0].checkpoint.path
    trainable = raysgd.Trainer(2, "none").to_trainable(
        saves_first, resume_from=os.path.relpath(start), reduce={"weight": "sum"}, callbacks=[Hooks()]
    )
    grid = fit(trainable, {"evaluates_s": tune.grid_search([0.0, 0.4])}, reuse_actors=True, max_concurrent_trials=1)
    for result in grid:
        assert result.error is None
        assert column(result, "step") == column(result, "training_iteration") == [2, 3]
        assert column(result, "weight") == [5.0, 7.0]
        kept = [
            (raysgd.load_checkpoint(found.path)["step"], metrics["step"]) for found, metrics in result.best_checkpoints
        ]
        assert kept == [(2, 2), (3, 3)]
        checkpoints = [raysgd.Checkpoint.from_path(found) for found, _ in result.best_checkpoints]
        assert [(found.iteration, found.metrics["step"]) for found in checkpoints] == [(2, 2), (3, 3)]
        assert Path(result.path, "run_001/hooks.txt").read_text() == "5.0\n7.0\n"


def test_trial_with_wrong_arguments_of_the_trainer_is_refused(fit: Fit) -> None:
    with pytest.raises(Exception, match=r"needs 9 x 1 CPU = 9, the cluster has 8"):
        fit(raysgd.Trainer(9, "none").to_trainable(counts))
    trainable = raysgd.Trainer(1, "none").to_trainable(counts, trainer_args_from="trainer")
    grid = fit(trainable, {"trainer": tune.grid_search([{"num_workers": 2}, {"num_workers": 9}, {"num_worker": 3}])})
    assert grid[0].error is None and grid[0].metrics["world_size"] == 2
    assert isinstance(grid[1].error, InfeasibleError)
    assert "needs 9 x 1 CPU = 9, the cluster has 8" in str(grid[1].error)
    assert isinstance(grid[2].error, ConfigError) and "config['trainer'] has 'num_worker'" in str(grid[2].error)
    given = tune.with_resources(raysgd.Trainer(2, "none").to_trainable(counts), {"cpu": 1})
    (refused,) = fit(given)
    assert isinstance(refused.error, InfeasibleError) and "room for 0" in str(refused.error)


def test_arguments_of_the_trainer_are_dimensions_of_the_search(fit: Fit) -> None:
    def arguments(config: dict[str, Any]) -> dict[str, Any]:
        return {"num_workers": {1.0: 1, 2.0: 3}[config["lr"]], "seed": 7}

    trainable = raysgd.Trainer(2, "none").to_trainable(counts, trainer_args_from=arguments)
    grid = fit(trainable, {"lr": tune.grid_search([1.0, 2.0, 9.0])}, reuse_actors=True, max_concurrent_trials=1)
    assert [result.metrics["world_size"] for result in list(grid)[:2]] == [1, 3]
    assert isinstance(grid[2].error, ConfigError) and "KeyError: 9.0" in str(grid[2].error)


def test_tunes_with_parameters_and_with_resources_are_supported(fit: Fit) -> None:
    def train_func(config: dict[str, Any], data: Any, scale: float = 1.0) -> None:
        assert not data.flags.writeable  # the memory of the object store
        raysgd.report(total=float(data.sum()) * scale * config["lr"])

    trainable = raysgd.Trainer(1, "none").to_trainable(train_func)
    given = tune.with_resources(
        tune.with_parameters(trainable, data=np.arange(5), scale=2.0), trial_resources(num_workers=1)
    )
    grid = fit(given, {"lr": tune.grid_search([1.0, 3.0])}, reuse_actors=True, max_concurrent_trials=1)
    assert [result.metrics["total"] for result in grid] == [20.0, 60.0]
    (refused,) = fit(trainable)
    assert "tune.with_parameters(trainable, data=...)" in str(refused.error)


def test_dataset_is_stored_once_and_may_depend_on_the_config(fit: Fit) -> None:
    def train_func(config: dict[str, Any]) -> None:
        rows = [row for batch in raysgd.get_dataset().get_split().iter_batches(4) for row in batch["x"].tolist()]
        everything = raysgd.broadcast(len(rows))
        raysgd.report(rows=sorted(rows), first=everything)

    trainer = raysgd.Trainer(2, "none")
    one_after_the_other: dict[str, Any] = {"reuse_actors": True, "max_concurrent_trials": 1}
    stored = trainer.to_trainable(train_func, {"x": np.arange(10)}, reduce=None)
    grid = fit(stored, {"lr": tune.grid_search([1.0, 2.0])}, **one_after_the_other)
    for result in grid:
        rows = raysgd.load_run(f"{result.path}/run_001").workers["rows"]
        assert sorted(row for some in rows for row in some) == list(range(10))

    def of_size(config: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.arange(config["size"])}

    grid = fit(trainer.to_trainable(train_func, of_size), {"size": tune.grid_search([4, 6])}, **one_after_the_other)
    for result in grid:
        rows = raysgd.load_run(f"{result.path}/run_001").workers["rows"]
        assert sorted(row for some in rows for row in some) == list(range(result.config["size"]))


def test_trainer_in_a_tune_function_uses_the_placement_group_of_its_trial(fit: Fit, tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> None:
        files = raysgd.RunConfig(storage_path=config["runs"])
        with raysgd.Trainer(2, "none", cpus_per_worker=4, run_config=files) as trainer:
            for result in trainer.run_generator(counts, config):
                tune.report(result)

    # Each trial has the whole cluster: the second one waits, and nothing but the trial's own group has room.
    space = {"lr": tune.grid_search([1.0, 2.0]), "runs": str(tmp_path / "runs")}
    grid = fit(tune.with_resources(function, trial_resources(num_workers=2, cpus_per_worker=4)), space)
    assert [column(result, "step") for result in grid] == [[1, 2, 3]] * 2
    assert [column(result, "training_iteration") for result in grid] == [[1, 2, 3]] * 2
    del function._resources  # Tune stores the resources here
    (refused,) = fit(function, {"runs": str(tmp_path / "runs")})
    assert isinstance(refused.error, InfeasibleError)
    assert "raysgd.tune_integration.trial_resources(num_workers=2)" in str(refused.error)


def test_killed_trial_resumes_from_its_checkpoint(fit: Fit, tmp_path: Path) -> None:
    class Kills(tune.Callback):
        was_killed: Any = None

        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
            if result["training_iteration"] == 3 and self.was_killed is None:
                self.was_killed = result["worker"]
                os.kill(result["pid"], signal.SIGKILL)

    kills = Kills()
    (result,) = fit(
        raysgd.Trainer(1, "none").to_trainable(counts),
        {"steps": 6, "sleep": 0.3},
        files={"callbacks": [kills], "failure_config": tune.FailureConfig(max_failures=1)},
    )
    assert result.error is None and kills.was_killed is not None
    assert until(lambda: not is_alive(kills.was_killed), PATIENCE_S)
    assert result.metrics["training_iteration"] == 6
    assert raysgd.load_checkpoint(result.checkpoint.path) == {"step": 6, "weight": 6.0}
    assert Path(result.path, "run_002").is_dir()


def test_retention_applies_to_trainer_and_tune(fit: Fit) -> None:
    trainer = raysgd.Trainer(1, "none", checkpoint_config=raysgd.CheckpointConfig(num_to_keep=1))
    (result,) = fit(
        trainer.to_trainable(counts),
        {"steps": 5},
        files={"checkpoint_config": tune.CheckpointConfig(num_to_keep=2)},
    )
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [4, 5]
    assert [raysgd.load_checkpoint(kept.path)["step"] for kept, _ in result.best_checkpoints] == [4, 5]
    assert len(os.listdir(f"{result.path}/run_001/checkpoints")) == 1


def fits_folds(config: dict[str, Any]) -> None:
    """Fit the mean of the training rows, and score it with the validation rows."""
    train, validation = (raysgd.get_dataset(name).get_split() for name in ("train", "validation"))
    mean = np.concatenate([batch["x"] for batch in train.iter_batches(4)]).mean() * config["lr"]
    rows = np.concatenate([batch["x"] for batch in validation.iter_batches(4)])
    if os.path.exists(config.get("ends_at", "")) and config["fold"] == 2:
        os.unlink(config["ends_at"])
        raise Diverged("the third fold")
    raysgd.report(error=float(((rows - mean) ** 2).mean()), fold_of_it=config["fold"], worker=os.getpid())
    raysgd.save_checkpoint({"mean": float(mean)})


def test_folds_are_runs_on_the_warm_workers_of_one_trial(fit: Fit) -> None:
    rows = np.arange(40, dtype=np.float64)
    pairs = raysgd.data.to_cv({"x": rows}, splits=4, seed=1)
    trainable = raysgd.Trainer(1, "none").to_trainable(fits_folds, pairs, cross_validate=True)
    grid = fit(trainable, {"lr": tune.grid_search([1.0, 0.5])}, reuse_actors=True, max_concurrent_trials=1)
    for result in grid:
        assert result.error is None
        assert column(result, "folds") == column(result, "training_iteration") == [1, 2, 3, 4]
        assert column(result, "fold/fold_of_it") == [0, 1, 2, 3]
        errors = column(result, "fold/error")
        assert result.metrics["error"] == pytest.approx(np.mean(errors))
        assert result.metrics["error_std"] == pytest.approx(np.std(errors))
        means = [raysgd.load_checkpoint(f"{result.checkpoint.path}/fold_{fold}")["mean"] for fold in range(4)]
        assert np.mean(means) == pytest.approx(rows.mean() * result.config["lr"])
    assert len({worker for result in grid for worker in column(result, "fold/worker")}) == 1
    assert grid.get_best_result("error", "min").config["lr"] == 1.0


def test_killed_trial_resumes_after_its_finished_folds(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "ends").touch()
    pairs = raysgd.data.to_cv({"x": np.arange(40, dtype=np.float64)}, splits=4, seed=1)
    trainable = raysgd.Trainer(1, "none").to_trainable(fits_folds, pairs, cross_validate=True)
    space = {"lr": 1.0, "ends_at": str(tmp_path / "ends")}
    reported = Reported()
    files = {"failure_config": tune.FailureConfig(max_failures=1), "callbacks": [reported]}
    (result,) = fit(trainable, space, files=files)
    assert result.error is None
    assert [fold["fold_of_it"] for fold in reported.column(result, "fold")] == [0, 1, 2, 3]
    assert result.metrics["folds"] == 4 and not (tmp_path / "ends").exists()
    assert [raysgd.load_checkpoint(f"{result.checkpoint.path}/fold_{fold}")["mean"] > 0 for fold in range(4)] == [
        True
    ] * 4
    with pytest.raises(ConfigError, match="cross_validate=True needs a dataset of"):
        raysgd.Trainer(1, "none").to_trainable(fits_folds, {"x": np.arange(4)}, cross_validate=True)
