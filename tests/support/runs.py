"""Helpers for tests of whole runs: a quiet Trainer, code that is shipped to its workers, and views of a run's files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import ray
from ray.exceptions import RayError

import raysgd
from raysgd.callbacks import ProgressCallback
from support.pace import slowness
from support.poll import until
from support.shared_cluster import CLUSTER

#: Far longer than anything here takes, also on a loaded machine.
PATIENCE_S = 60.0 * slowness()


def travels_by_value(module: str) -> None:
    """Ship a test module's functions and classes by value: workers cannot import it or ``support``."""
    for name in (module, "support.poll", __name__):
        cloudpickle.register_pickle_by_value(sys.modules[name])
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])  # for what the controller sees, such as backends


def quiet() -> list[raysgd.Callback]:
    """Return the callbacks of a run that prints nothing."""
    return [ProgressCallback(mode="off")]


class HostLog(raysgd.Callback):
    """Writes a line per result, in the callback host: a metric of the result, and the host's process id."""

    runs_in = "controller"

    def __init__(self, file: Path, metric: str = "step") -> None:
        self.file = str(file)
        self.metric = metric

    def on_result(self, result: raysgd.Result) -> None:
        with open(self.file, "a") as file:
            file.write(json.dumps([result[self.metric], os.getpid()]) + "\n")


def make_trainer(
    storage: Path,
    num_workers: int | tuple[int, float] = 2,
    backend: str | raysgd.BackendConfig = "none",
    **settings: Any,
) -> raysgd.Trainer:
    """Return a Trainer whose runs are stored below ``storage``."""
    return raysgd.Trainer(num_workers, backend, run_config=raysgd.RunConfig(storage_path=storage), **settings)


def pids(trainer: raysgd.Trainer) -> list[int]:
    """Return the process ids of a Trainer's workers by rank; start the workers if needed."""
    found: list[int] = trainer.run(os.getpid, callbacks=quiet(), returns="all")
    return found


def are_gone(processes: list[int], timeout_s: float = 20) -> bool:
    """Return whether all processes end within the time."""
    return until(lambda: not any(is_alive(pid) for pid in processes), timeout_s, interval_s=0.1)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def actor_pids(kind: str) -> list[int]:
    """Return the process ids of a class's actors in this process's own cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if f"ray::{kind}" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def wait_for_ready_spare(members: Collection[int]) -> int:
    """Wait until the only worker besides these is ready, and return its process id."""

    def find_ready() -> list[int]:
        ready = []
        for actor in ray.util.list_named_actors(all_namespaces=True):
            with contextlib.suppress(ValueError, RayError):  # it has ended meanwhile
                if "-worker-" in actor["name"]:
                    worker = ray.get_actor(actor["name"], actor["namespace"])
                    asked = worker.__ray_call__.remote(lambda self: (os.getpid(), self._backend is not None))
                    pid, has_loaded = ray.get(asked, timeout=PATIENCE_S)
                    ready += [pid] if has_loaded and pid not in members else []
        return ready

    (spare,) = until(find_ready, PATIENCE_S)
    return spare


def ray_processes() -> list[str]:
    """Describe the processes of this process's own cluster, without idle ones and Ray's own."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "ray::" in line and not CLUSTER.owns(process):
                found.append(f"{process.pid} {process.status()} {line[:60]}")
    return found


def controller_pid() -> int:
    """Return the process id of the only TrainerActor of this process's own cluster."""
    (pid,) = actor_pids("TrainerActor")
    return pid


def latest_run(trainer: raysgd.Trainer) -> Any:
    """Return the latest run from its files, when all are written."""
    trainer.get_last_checkpoint()  # waits until the run is closed, also a failed one
    assert trainer.run_dir is not None
    return raysgd.load_run(trainer.run_dir)


def events_of(trainer: raysgd.Trainer, kind: str) -> list[dict[str, Any]]:
    """Return the data of the latest run's events of a kind, in order."""
    events = latest_run(trainer).events
    return list(events[events["kind"] == kind]["data"])


def once(folder: str, what: str) -> bool:
    """Return True for the first caller of all processes."""
    try:
        Path(folder, what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
