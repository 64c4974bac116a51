"""A search with Ray Tune."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measures.base import Measure
from bench.systems.base import System
from bench.worker import session_of

_CONCURRENT = 2
_NUM_WORKERS = 2
_REPORTS = 3


def _params_of_tune_search(system: str, quick: bool) -> dict[str, Any]:
    return {"trials": 2 if quick else 12}


def run_tune_search(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time a search: 12 trials of 2 torch workers with a gloo group and 3 reports each, 2 trials at a time.

    Ray Train is used as documented: a Tune function makes a TorchTrainer with a ``TuneReportCallback``. Its workers are new
    for each trial in any case, so both series have the same value.
    """
    if system.name != "raysgd":
        taken_s = _search(system, _of_ray_train, params["trials"], reuse_actors=False)
        return {"search_s": [taken_s], "reused_s": [taken_s]}
    return {
        series: [_search(system, _of_raysgd, params["trials"], reuse_actors=reuse_actors)]
        for series, reuse_actors in (("search_s", False), ("reused_s", True))
    }


def _search(system: System, make: Callable[[Path], Any], num_trials: int, *, reuse_actors: bool) -> float:
    from ray import tune

    folder = system.folder / ("reused" if reuse_actors else "fresh")
    folder.mkdir()
    start = time.perf_counter()
    tuner = tune.Tuner(
        make(folder),
        param_space={"lr": tune.uniform(0.0, 1.0), "system": system.name},
        tune_config=tune.TuneConfig(
            num_samples=num_trials, max_concurrent_trials=_CONCURRENT, reuse_actors=reuse_actors
        ),
        run_config=tune.RunConfig(storage_path=str(folder), name="search", verbose=0),
    )
    grid = tuner.fit()
    taken_s = time.perf_counter() - start
    for result in grid:
        assert result.error is None, result.error
        assert result.metrics is not None and result.metrics["step"] == _REPORTS
    assert len(grid) == num_trials
    return taken_s


def train_search(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    here = session_of(config)
    for step in range(1, _REPORTS + 1):
        total = torch.ones(1)
        dist.all_reduce(total)
        here.report({"step": step, "loss": config["lr"] / step, "ranks": int(total)})


def _of_raysgd(folder: Path) -> Any:
    import raysgd

    return raysgd.Trainer(_NUM_WORKERS).to_trainable(train_search)


def _of_ray_train(folder: Path) -> Any:
    def drive(config: dict[str, Any]) -> None:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
        from ray.tune.integration.ray_train import TuneReportCallback

        TorchTrainer(
            train_search,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=_NUM_WORKERS),
            run_config=RunConfig(
                name=f"train-{time.time_ns()}", storage_path=str(folder / "runs"), callbacks=[TuneReportCallback()]
            ),
        ).fit()

    return drive


TUNE_SEARCH = Measure(
    name="tune_search",
    title="A search",
    systems=("ray_train", "ray_train_tuned", "raysgd"),
    quick_systems=("ray_train", "raysgd"),
    units={"search_s": "s", "reused_s": "s"},
    repeat=3,
    timeout_s=900.0,
    #: Two trials at a time need four CPUs, and Tune takes another one for each function.
    environment={"BENCH_NUM_CPUS": "8", "RAY_AIR_NEW_OUTPUT": "0"},
    params=_params_of_tune_search,
    run=run_tune_search,
)
