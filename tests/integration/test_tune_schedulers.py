"""Searches with real schedulers and search algorithms: trials that are stopped, paused, cloned, grown, killed and restored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import tune
from ray.util import placement_group_table

import raysgd
from raysgd.checkpoint.storage.storage import Storage
from raysgd.tune_integration import search
from raysgd.viewer.catalog import Catalog
from support.poll import until
from support.project import ROOT
from support.runs import travels_by_value
from support.searches import Fit, Progress, Reported, TuneWaits, check_nothing_is_held, column, counts, events_in
from support.shared_cluster import CLUSTER

travels_by_value(__name__)
travels_by_value("support.searches")
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_leftovers_of_trials")]


def test_asha_stops_trials_and_releases_their_resources(fit: Fit) -> None:
    class Sees(tune.Callback):
        """Records the free resources after a trial was stopped early, while others are still running."""

        was_stopped = False
        free = 0.0

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self.was_stopped = True

        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
            if self.was_stopped:  # while this trial trains
                self.free = max(self.free, ray.available_resources().get("CPU", 0.0))

    sees = Sees()
    worse_is_slower = tune.sample_from(lambda config: 0.8 / config["lr"])  # and reaches a rung after the better trials
    scheduler = tune.schedulers.ASHAScheduler(max_t=30, grace_period=2, reduction_factor=2)
    grid = fit(
        raysgd.Trainer(1, "none", cpus_per_worker=4).to_trainable(counts),
        {"lr": tune.grid_search([4.0, 1.0]), "steps": 30, "sleep": worse_is_slower},
        scheduler=scheduler,
        metric="weight",
        mode="max",
        files={"callbacks": [sees]},
    )
    reached = [result.metrics["training_iteration"] for result in grid]
    assert reached[0] == 30 and reached[1] < 30
    assert [result.error for result in grid] == [None] * 2
    assert sees.was_stopped and sees.free >= 4
    ends = [
        next(event["data"]["message"] for event in events_in(result) if event["kind"] == "run_end") for result in grid
    ]
    assert ends == ["", "the search ended this trial"], "the files say who ended the run"
    best = grid.get_best_result()
    assert raysgd.load_checkpoint(best.checkpoint)["step"] == 30


def test_paused_trial_does_not_train(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a paused trial waits for the slower trial, and continues when the pause ends."""
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        hyperparam_mutations={"lr": [1.0]},
        quantile_fraction=0.0,
        synch=True,
    )
    reported = Reported()
    grid = fit(
        raysgd.Trainer(1, "none").to_trainable(counts),
        {
            "n": tune.grid_search([0, 1]),
            "steps": tune.sample_from(lambda config: [40, 4][config["n"]]),
            "sleep": tune.sample_from(lambda config: [0.4, 4.5][config["n"]]),
        },
        scheduler=scheduler,
        metric="weight",
        mode="max",
        reuse_actors=True,
        files={"stop": {"training_iteration": 6}, "callbacks": [reported]},
    )
    assert [result.metrics["training_iteration"] for result in grid] == [6, 4]
    assert reported.column(grid[0], "weight") == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    made = len(raysgd.load_run(f"{grid[0].path}/run_001").metrics)
    assert made < 39, "it trained while it was paused"


def test_population_based_training_resumes_from_another_trial(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=4,
        hyperparam_mutations={"lr": [1.0, 100.0]},
        quantile_fraction=0.5,
        resample_probability=0.0,
    )
    reported = Reported()
    grid = fit(
        raysgd.Trainer(1, "none").to_trainable(counts),
        {"lr": tune.grid_search([1.0, 100.0]), "steps": 16, "sleep": 0.05, "begin_together": str(tmp_path / "begun")},
        scheduler=scheduler,
        metric="weight",
        mode="max",
        reuse_actors=True,
        files={"callbacks": [reported]},
    )
    assert [result.error for result in grid] == [None, None]
    for result in grid:
        assert reported.column(result, "training_iteration") == reported.column(result, "step")
        assert result.metrics["training_iteration"] == 16
        assert raysgd.load_checkpoint(result.checkpoint)["step"] == 16
    rows = Catalog(Storage.from_uri(grid[0].path)).list_runs()
    assert any(f"/{Path(grid[1].path).name}/checkpoint_" in row["source"] for row in rows), "the lineage is on storage"
    weights = reported.column(grid[0], "weight")
    assert weights[:4] == [1.0, 2.0, 3.0, 4.0]
    assert max(np.diff(weights)) > 200, (
        weights
    )  # the trial resumed from the weights of the other, which is more than a step ahead


def test_trial_grows_when_others_end_but_waiting_trials_come_first(fit: Fit) -> None:
    trainable = raysgd.Trainer((1, 2), "none", cpus_per_worker=4).to_trainable(counts)
    # The third trial waits until the second one ends. The first runs until it has reached its maximum size: the time depends
    # on how fast the machine starts workers.
    steps = tune.sample_from(lambda config: [2000, 20, 20][config["n"]])
    until_size = tune.sample_from(lambda config: 2 if config["n"] == 0 else None)
    space = {"n": tune.grid_search([0, 1, 2]), "steps": steps, "sleep": 0.1, "until_size": until_size}
    grid = fit(trainable, space)
    assert [result.error for result in grid] == [None] * 3
    events = [event for result in grid for event in events_in(result)]
    starts = [event for event in events if event["kind"] == "attempt_start"]
    grew_at = [event["timestamp"] for event in starts if event["data"]["world_size"] > 1]
    last_began = max(event["timestamp"] for event in events if event["kind"] == "run_start")
    assert min(grew_at) > last_began
    assert column(grid[0], "world_size")[-1] == 2
    made = column(grid[0], "training_iteration")
    assert made == list(range(1, len(made) + 1))


def test_additional_workers_of_a_trial_end_with_it(fit: Fit) -> None:
    class KillsTheGrown(tune.Callback):
        groups: Any = ()

        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
            if result["world_size"] == 2 and not self.groups:
                self.groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
                os.kill(result["pid"], signal.SIGKILL)

    kills = KillsTheGrown()
    trainable = raysgd.Trainer((1, 2), "none").to_trainable(counts)
    (result,) = fit(trainable, {"steps": 600, "sleep": 0.1}, files={"callbacks": [kills]})
    assert result.error is not None
    assert len(kills.groups) == 2, kills.groups
    check_nothing_is_held()


def test_many_trials_leave_nothing_behind(fit: Fit) -> None:
    trainable = raysgd.Trainer(1, "none", cpus_per_worker=4).to_trainable(counts)
    grid = fit(trainable, {"lr": tune.uniform(0.0, 1.0), "steps": 2}, num_samples=15, reuse_actors=True)
    assert len(grid) == 15 and not grid.errors
    assert {result.metrics["training_iteration"] for result in grid} == {2}
    assert len({result.metrics["worker"] for result in grid}) <= 4
    check_nothing_is_held()


def test_hyperband_pauses_and_resumes_trials(fit: Fit) -> None:
    """Under load the search sometimes stalls; where Tune itself requests no trial, the test is an expected failure.

    doc/design/0020-trials.md has the reason.
    """
    scheduler = tune.schedulers.HyperBandScheduler(time_attr="training_iteration", max_t=9, reduction_factor=3)
    reported = Reported()
    try:
        grid = fit(
            raysgd.Trainer(1, "none").to_trainable(counts),
            {"lr": tune.grid_search([1.0, 2.0, 3.0, 4.0, 5.0]), "steps": 9, "sleep": 0.02},
            scheduler=scheduler,
            metric="weight",
            mode="max",
            reuse_actors=True,
            files={"callbacks": [reported, Progress(limit_s=90)]},
        )
    except TuneWaits as waits:
        CLUSTER.renew()
        pytest.xfail(str(waits))
    assert [result.error for result in grid] == [None] * 5
    for result in grid:
        weights = reported.column(result, "weight")
        assert weights[-1] == pytest.approx(result.config["lr"] * result.metrics["training_iteration"])
    assert max(result.metrics["training_iteration"] for result in grid) == 9


def test_hyperband_ends_when_the_last_trial_finishes_in_the_judged_round(fit: Fit) -> None:
    """The other trial is paused; Tune would never resume it if the last round arrived together with the end."""
    scheduler = tune.schedulers.HyperBandScheduler(time_attr="training_iteration", max_t=3, reduction_factor=3)
    grid = fit(
        raysgd.Trainer(1, "none").to_trainable(counts),
        {"n": tune.grid_search([0, 1]), "steps": 3, "sleep": tune.sample_from(lambda config: [0.0, 2.0][config["n"]])},
        scheduler=scheduler,
        metric="weight",
        mode="max",
    )
    assert [result.metrics["training_iteration"] for result in grid] == [3, 3]
    assert [raysgd.load_checkpoint(result.checkpoint)["step"] for result in grid] == [3, 3]


SEARCH = """
import os, sys, time
import ray
import raysgd
from ray import tune

def train_func(config):
    state = raysgd.load_checkpoint() or {"step": 0}
    for step in range(state["step"] + 1, 31):
        while step > 20 and not os.path.exists(config["killed"]):  # no trial ends before the kill
            time.sleep(0.1)
        raysgd.report(step=step, began=state["step"])
        raysgd.save_checkpoint({"step": step})

ray.init(address="auto", log_to_driver=False)
trainable = raysgd.Trainer(1, "none", cpus_per_worker=4).to_trainable(train_func)
path = os.path.join(sys.argv[1], "search")
if tune.Tuner.can_restore(path):
    tuner = tune.Tuner.restore(path, trainable, resume_errored=True)
else:
    files = tune.RunConfig(name="search", storage_path=sys.argv[1], verbose=0)
    tuner = tune.Tuner(trainable, param_space={"lr": tune.grid_search([1, 2, 3]), "killed": sys.argv[2]}, run_config=files)
grid = tuner.fit()
for result in grid:
    saved = raysgd.load_checkpoint(result.checkpoint.path)["step"]
    print("TRIAL", result.error, result.metrics["step"], result.metrics["began"], saved)
"""


def test_killed_search_is_restored(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(SEARCH)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # another test may have renewed the cluster
        "TUNE_GLOBAL_CHECKPOINT_S": "1",
        "RAY_AIR_NEW_OUTPUT": "0",
    }
    command = [sys.executable, "search.py", str(tmp_path / "runs"), str(tmp_path / "killed")]
    log = tmp_path / "first.log"
    with log.open("w") as output:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        saved = tmp_path / "runs/search"
        has_two = until(lambda: len({found.parent for found in saved.glob("*/checkpoint_00001*")}) == 2, 120)
        assert has_two, log.read_text()[-3000:]
        known_from = time.time() + 1  # any search state written later includes these checkpoints
        assert until(lambda: _written_at(saved) > known_from, 60)
    finally:
        first.kill()
        first.wait()
    (tmp_path / "killed").touch()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    trials = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("TRIAL")]
    assert len(trials) == 3, done.stdout[-3000:] + done.stderr[-3000:]
    assert [(error, step, saved) for error, step, _, saved in trials] == [("None", "30", "30")] * 3
    assert sum(int(began) > 0 for _, _, began, _ in trials) == 2, trials  # two trials resumed from their checkpoints


def _written_at(search: Path) -> float:
    """Return when Tune last wrote the state of a search."""
    return max((path.stat().st_mtime for path in search.glob("experiment_state-*.json")), default=0.0)


def test_optuna_searches_a_space(ray_cluster: Any, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    grid = search(
        raysgd.Trainer(1, "none", checkpoint_config=raysgd.CheckpointConfig(num_to_keep=1)),
        counts,
        {"lr": tune.uniform(0.0, 10.0), "steps": 2},
        metric="weight",
        mode="max",
        num_samples=4,
        search_alg=OptunaSearch(seed=0),
        max_concurrent_trials=2,
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    assert len(grid) == 4 and not grid.errors
    assert len({result.config["lr"] for result in grid}) == 4
    best = grid.get_best_result()
    assert best.metrics["weight"] == pytest.approx(2 * best.config["lr"])
    assert best.metrics["weight"] == max(result.metrics["weight"] for result in grid)
    assert [len(result.best_checkpoints) for result in grid] == [1] * 4
    assert len({result.metrics["worker"] for result in grid}) <= 2
