"""What tests of whole runs share: a quiet Trainer, code that travels to its workers, and looks at what a run left."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import ray

import raysgd
from raysgd.callbacks import ProgressCallback
from support.poll import until
from support.shared_cluster import CLUSTER

#: Far above what anything here takes, so that a hang fails by name and a loaded machine does not.
PATIENCE_S = 60.0


def travels_by_value(module: str) -> None:
    """Let the functions and classes of a test module reach the workers, which can import neither it nor ``support``."""
    for name in (module, "support.poll", __name__):
        cloudpickle.register_pickle_by_value(sys.modules[name])
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])  # for what the controller sees, such as backends


def quiet() -> list[raysgd.Callback]:
    """The callbacks of a run that shows nothing."""
    return [ProgressCallback(mode="off")]


def make_trainer(
    storage: Path,
    num_workers: int | tuple[int, float] = 2,
    backend: str | raysgd.BackendConfig = "none",
    **settings: Any,
) -> raysgd.Trainer:
    """A Trainer whose runs lie below ``storage``."""
    return raysgd.Trainer(num_workers, backend, run=raysgd.RunConfig(storage_path=storage), **settings)


def pids(trainer: raysgd.Trainer) -> list[int]:
    """The processes of a Trainer's workers by rank; brings them up."""
    found: list[int] = trainer.run(os.getpid, callbacks=quiet(), returns="all")
    return found


def are_gone(processes: list[int], timeout_s: float = 20) -> bool:
    """Whether all of them end within the time."""
    return until(lambda: not any(is_alive(pid) for pid in processes), timeout_s, interval_s=0.1)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def actor_pids(kind: str) -> list[int]:
    """The processes of this process's own cluster that are actors of a class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if f"ray::{kind}" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def ray_processes() -> list[str]:
    """What the processes of this process's own cluster are, beside those that Ray has for itself, and idle ones."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "ray::" in line and not CLUSTER.owns(process):
                found.append(f"{process.pid} {process.status()} {line[:60]}")
    return found


def controller_pid() -> int:
    """The process of the one TrainerActor of this process's own cluster."""
    (pid,) = actor_pids("TrainerActor")
    return pid


def latest_run(trainer: raysgd.Trainer) -> Any:
    """The files of the latest run, once it has written all of them."""
    trainer.get_last_checkpoint()  # waits until the run is closed, also one that failed
    assert trainer.run_dir is not None
    return raysgd.load_run(trainer.run_dir)


def events_of(trainer: raysgd.Trainer, kind: str) -> list[dict[str, Any]]:
    """The data of the latest run's events of a kind, in order."""
    events = latest_run(trainer).events
    return list(events[events["kind"] == kind]["data"])


def once(folder: str, what: str) -> bool:
    """True for the first who asks, in whatever process."""
    try:
        Path(folder, what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
