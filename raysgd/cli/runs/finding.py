"""Finds the run that a user means, and adds what the cluster says to what the files of runs say. Driver side."""

from __future__ import annotations

import time
from dataclasses import replace

from raysgd._util.redact import redact_uri
from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli import cluster
from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError
from raysgd.result import ENDED, LIVE, RunStatus
from raysgd.runs.finding import find_by_name, newest_run
from raysgd.runs.state import RunState


def existing_folder(path: str) -> Storage:
    """Open a folder by its path or URI; it need not exist.

    Raises:
        ConfigError: It is a file, or no file system is known for the URI.
    """
    folder = Storage.from_uri(path)
    if folder.exists() and not folder.is_folder(""):
        raise ConfigError(f"{path} is a file; give a folder. `raysgd ls` lists the folders of runs.")
    return folder


def find_run(given: str, storage_path: str, address: str | None = None) -> Storage:
    """Return the folder of the run that a user means.

    Args:
        given: The folder of a run; that of a Trainer, for its newest run; a name in the storage path, such as ``exp``,
            ``exp/run_002`` or as ``raysgd ls`` shows it; or the name of a detached Trainer.
        storage_path: The folder of all runs.
        address: The cluster, which is asked for detached Trainers.

    Raises:
        ConfigError: There is no such run; the message names the nearest.
    """
    if (found := newest_run(existing_folder(given))) is not None:
        return found
    runs = Storage.from_uri(storage_path)
    names: list[str] = []
    if "://" not in given and not given.startswith(("/", "~", ".")):
        if (found := find_by_name(runs, given.strip("/"))) is not None:
            return found
        if (run_dir := _run_dir_of(given, address)) is not None:
            return Storage.from_uri(run_dir)
        names = runs.list_names()
    raise ConfigError(
        f"there is no run {given}: it is neither the folder of a run, nor a name in {runs.path_of('')}"
        f"{nearest(given, names)}, nor a detached Trainer of a running cluster; `raysgd ls` lists the runs."
    )


def _run_dir_of(alias: str, address: str | None) -> str | None:
    if cluster.connect(address) is None:
        return None
    statuses = (trainer.status for trainer in cluster.live_trainers() if trainer.alias == alias)
    return next((status.run_dir for status in statuses if status is not None and status.run_dir), None)


def with_live(states: list[RunState], trainers: list[cluster.LiveTrainer]) -> list[RunState]:
    """Return the states with what the cluster says of runs that are live; runs in other folders are added, first."""
    live = {
        _key(trainer.status.run_dir): (trainer.status, trainer.alias)
        for trainer in trainers
        if trainer.status is not None and trainer.status.run_dir
    }
    merged = [_merge(state, *live.pop(_key(state.run_dir), (None, None))) for state in states]
    added = [
        _merge(RunState("/".join(key.split("/")[-2:]), status.run_dir, "", ended_s=time.time()), status, alias)
        for key, (status, alias) in live.items()
        if status.state in LIVE
    ]
    return added + merged


def _merge(state: RunState, status: RunStatus | None, alias: str | None) -> RunState:
    if status is None:
        return state
    return replace(
        state,
        state=status.state,
        alias=alias,
        is_live=status.state in LIVE,
        iteration=state.iteration or status.iteration,  # that of the metrics: both by the files, or none
        world_size=state.world_size if status.state in ENDED else status.world_size,
        num_failures=max(state.num_failures, status.num_failures),
    )


def _key(run_dir: str) -> str:
    """Return what is equal for the same folder, with and without the options of its URI."""
    return redact_uri(run_dir.partition("?")[0]).rstrip("/")
