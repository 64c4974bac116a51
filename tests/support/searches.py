"""Helpers for tests of searches: a search without its display, trials that count, and checks for leftovers."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.util import placement_group_table

import raysgd
from support.poll import until
from support.runs import PATIENCE_S, actor_pids, ray_processes
from support.shared_cluster import CLUSTER

Fit = Callable[..., tune.ResultGrid]


def fit_in(folder: Path) -> Fit:
    """Return a function that runs a search with its files in this folder."""

    def fit(trainable: Any, space: dict[str, Any] | None = None, **settings: Any) -> tune.ResultGrid:
        files = {"storage_path": str(folder), "verbose": 0, **settings.pop("files", {})}
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(**settings),
            run_config=tune.RunConfig(**files),
        )
        return tuner.fit()

    return fit


def nothing_is_held() -> bool:
    """Return whether all resources are free, and no placement group or process of a trial is left."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return (
        free.get("CPU") == total["CPU"]
        and all(group["state"] == "REMOVED" for group in placement_group_table().values())
        and not actor_pids("WorkerActor")
        and not actor_pids("TrainerActor")
        and not actor_pids("PlacementGuard")
    )


def has_no_leftovers() -> bool:
    """Return whether no placement group or process of a trial is left."""
    groups_are_gone = all(group["state"] == "REMOVED" for group in placement_group_table().values())
    return groups_are_gone and not ray_processes()


def check_nothing_is_held() -> None:
    """Check that trials left no resource, placement group or process behind.

    Ray 2.60 itself loses the CPU of a placement group that is removed right after it was asked for, as Tune does where it
    pauses trials (doc/design/0020-trials.md). Where a CPU is not free and nobody has it, the next test gets another
    cluster.
    """
    assert until(has_no_leftovers, PATIENCE_S), describe_held_resources()
    if not until(nothing_is_held, 10):
        warnings.warn(f"Ray has lost a CPU: {describe_held_resources()}", stacklevel=2)
        CLUSTER.renew()


def describe_held_resources() -> str:
    """Describe the resources, placement groups and processes in use, for an error message."""
    groups = [(group["name"], group["state"]) for group in placement_group_table().values()]
    left = [group for group in groups if group[1] != "REMOVED"]
    free = {name: amount for name, amount in ray.available_resources().items() if name == "CPU" or "group" in name}
    return f"{free} of {ray.cluster_resources()['CPU']} CPUs free, groups {left}, {ray_processes()}, {_leases()}"


def _leases() -> list[str]:
    """Return the lines about leases in the node's debug file, which is some seconds old."""
    state = Path(ray._private.worker._global_node.get_session_dir_path(), "logs", "debug_state.txt")  # type: ignore[attr-defined]
    lines = state.read_text().splitlines() if state.exists() else []
    return [line.strip() for line in lines if "leas" in line.lower() or "pending" in line.lower()][:40]


def counts(config: dict[str, Any]) -> str:
    """Count to ``steps`` with a checkpoint per step, or until the group has ``until_size`` workers.

    ``begin_together``: a folder through which two trials wait for each other.
    """
    state = raysgd.load_checkpoint() or {"step": 0, "weight": 0.0}
    step, weight = state["step"], state["weight"]
    if step == 0 and "begin_together" in config:
        begun = Path(config["begin_together"])
        (begun / str(os.getpid())).touch()
        while len(list(begun.iterdir())) < 2:
            time.sleep(0.01)
    while step < config.get("steps", 3):
        if (step, raysgd.world_rank()) == (config.get("dies_at"), 1) and not os.path.exists(config["mark"]):
            Path(config["mark"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(config.get("sleep", 0.0))
        step, weight = step + 1, weight + config.get("lr", 1.0)
        raysgd.report(step=step, weight=weight, rank=raysgd.world_rank(), worker=os.getpid())
        raysgd.save_checkpoint({"step": step, "weight": weight})
        if raysgd.world_size() == config.get("until_size"):
            break
    return "done"


def column(result: Any, name: str) -> list[Any]:
    """Return a metric of each round; after a late save, Tune has the last round twice."""
    return list(result.metrics_dataframe.drop_duplicates("training_iteration")[name])


def events_in(result: Any) -> list[dict[str, Any]]:
    """Return the events in the journal of a trial's run."""
    return [json.loads(line) for line in Path(result.path, "run_001/events.jsonl").read_text().splitlines()]


class TuneWaits(Exception):
    """Raised when all unfinished trials are paused and their scheduler resumes none of them."""


class Progress(tune.Callback):
    """Ends a search that makes no progress, with an error that lists the states of its trials."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last, self._seen = time.monotonic(), ""

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        seen = ", ".join(f"{trial.status} at {trial.last_result.get('training_iteration', 0)}" for trial in trials)
        if seen != self._seen:
            self._last, self._seen = time.monotonic(), seen
        elif time.monotonic() - self._last > self._limit_s:
            is_tunes = {trial.status for trial in trials} <= {"PAUSED", "TERMINATED"}
            raise (TuneWaits if is_tunes else AssertionError)(f"no progress: {seen}; {describe_held_resources()}")


class Reported(tune.Callback):
    """Records all results that Tune received, by the folder of the trial.

    Tune's own files lose some when a trial resumes, and the last metrics of a trial may name the one that it resumed from.
    """

    def __init__(self) -> None:
        self.results: dict[str, list[dict[str, Any]]] = {}

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        self.results.setdefault(trial.storage.trial_fs_path, []).append(dict(result))

    def column(self, result: Any, name: str) -> list[Any]:
        return [row[name] for row in self.results[result.path]]
