"""A driver whose workers have another raysgd: ``python -m support.version_job SCENARIO FOLDER``, in an empty directory.

The folder has changed copies of the package: ``other_format``, ``other_python``, ``other_version`` and ``unusable``. Each
result is a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import raysgd

FOLDER = Path(sys.argv[2])


def make_trainer(num_workers: int | tuple[int, int], package: str | None = None, **settings: Any) -> raysgd.Trainer:
    env = {"env_vars": {"PYTHONPATH": str(FOLDER / package)}} if package else None  # an absolute path stays as it is
    run = raysgd.RunConfig(storage_path=str(FOLDER / "runs"))
    return raysgd.Trainer(num_workers, backend="none", run_config=run, runtime_env=env, **settings)


def where() -> str:
    return raysgd.__file__


def show(what: str, trainer: raysgd.Trainer | None = None, **values: Any) -> None:
    if trainer is not None and trainer.run_dir is not None:
        events = raysgd.load_run(trainer.run_dir).events
        values["warnings"] = [data["message"] for data in events[events["kind"] == "warning"]["data"]]
        values["num_failures"] = int((events["kind"] == "failure").sum())
    print(json.dumps({"what": what, **values}), flush=True)


def try_run(what: str, trainer: raysgd.Trainer) -> None:
    begin = time.monotonic()
    try:
        show(what, trainer, returned=trainer.run(where, callbacks=[]))
    except raysgd.errors.RaySGDError as error:
        show(what, trainer, error=f"{type(error).__name__}: {error}", took_s=time.monotonic() - begin)


def run_at_start() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for package in ("other_format", "other_python", "unusable"):
        with make_trainer(2, package) as trainer:
            try_run(package, trainer)
    with make_trainer(2, "other_version") as trainer:
        try_run("other_version", trainer)
        try_run("other_version again", trainer)


def run_with_another_environment_for_the_program() -> None:
    env = {"env_vars": {"PYTHONPATH": str(FOLDER / "other_format")}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=env)
    with make_trainer(2) as trainer:
        try_run("other_format", trainer)


def train_func(config: dict[str, Any]) -> None:
    state = raysgd.load_checkpoint() or {"step": 0}
    for step in range(state["step"], 100_000):
        raysgd.report(step=step, size=raysgd.world_size())
        raysgd.save_checkpoint({"step": step + 1})
        time.sleep(0.05)
        if raysgd.broadcast(os.path.exists(config["end"])):
            return


def start_cluster() -> Cluster:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def run_with_its_own_raysgd() -> None:
    """A run brings its raysgd to a node that has none."""
    start_cluster().add_node(num_cpus=1, env_vars={"PYTHONPATH": str(FOLDER / "unusable")})
    failure = raysgd.FailureConfig(heartbeat_timeout_s=2)
    with make_trainer(2, os.environ["PYTHONPATH"], failure_config=failure) as trainer:
        end = FOLDER / "end"
        stream = trainer.run_generator(train_func, {"end": str(end)}, callbacks=[])
        next(stream)
        time.sleep(5)  # an agent that cannot start is started again every 0.5 s
        actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        end.touch()
        stream.get_returns()
        show("brings", trainer, agents=[name.rpartition("-")[2] for name in actors if "-agent-" in name])


def run_with_nodes_that_join(num_workers: int | tuple[int, int]) -> None:
    """An elastic run grows, or a run of fixed size replaces a lost worker: a bad node joins first, then a good one."""
    cluster = start_cluster()
    lost = cluster.add_node(num_cpus=1) if num_workers == 2 else None
    with make_trainer(num_workers) as trainer:
        end = FOLDER / "end"
        stream = trainer.run_generator(train_func, {"end": str(end)}, callbacks=[])
        next(stream)
        path = os.pathsep.join([str(FOLDER / "other_format"), os.environ["PYTHONPATH"]])
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
        if lost is not None:
            cluster.remove_node(lost)
        _wait_until_refused(trainer)
        cluster.add_node(num_cpus=1)
        while (result := next(stream))["attempt"] == 1 or result["size"] == 1:
            pass
        end.touch()
        stream.get_returns()
        show("joins", trainer)


def _wait_until_refused(trainer: raysgd.Trainer) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = raysgd.load_run(str(trainer.run_dir)).events
        if any("is not used until" in data["message"] for data in events[events["kind"] == "warning"]["data"]):
            return
        time.sleep(0.2)
    raise TimeoutError("no node was refused")


SCENARIOS = {
    "start": run_at_start,
    "program": run_with_another_environment_for_the_program,
    "brings": run_with_its_own_raysgd,
    "grows": lambda: run_with_nodes_that_join((1, 2)),
    "replaces": lambda: run_with_nodes_that_join(2),
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
