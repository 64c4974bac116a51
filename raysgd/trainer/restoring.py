"""A Trainer as it was for a run, from that run's folder. Driver side."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._util.redact import REDACTED
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.errors import CheckpointNotFoundError, ConfigError

_RUN = re.compile(r"run_[0-9]+")


@dataclass(frozen=True)
class Restored:
    """What a run's folder tells.

    Attributes:
        arguments: Of the Trainer.
        runs_uri: The folder that the next run's folder is to stand in.
        checkpoint: The newest that can be gone on from; None: there is none.
        passed_over: A line on each newer one that cannot.
    """

    arguments: dict[str, Any]
    runs_uri: str
    checkpoint: Checkpoint | None
    passed_over: list[str]


def describe_scaling(scaling: ScalingConfig) -> dict[str, Any]:
    """The arguments that say how many workers a Trainer has, and of what, as JSON has them."""
    most = scaling.max_workers
    elastic = [scaling.min_workers, None if math.isinf(most) else most]
    return {
        "num_workers": elastic if scaling.is_elastic else scaling.min_workers,
        "cpus_per_worker": scaling.cpus_per_worker,
        "gpus_per_worker": scaling.gpus_per_worker,
        "resources_per_worker": dict(scaling.resources_per_worker),
        "placement_strategy": scaling.placement_strategy,
    }


def restore_run(run_dir: str | os.PathLike[str], changes: Mapping[str, Any]) -> Restored:
    """Read what a run was made with, and find where it can be gone on from.

    Args:
        run_dir: The run's folder, path or URI.
        changes: Arguments of the Trainer that are to be others.

    Raises:
        CheckpointNotFoundError: The folder is no run's.
        ConfigError: An argument was not written down, for what is in it, and is not among the changes.
    """
    folder = Storage.from_uri(run_dir)
    if not folder.exists("run.json"):
        raise CheckpointNotFoundError(f"{folder.uri} is no run's folder (it has no run.json){_suggest(folder)}")
    description = json.loads(folder.read_bytes("run.json"))
    if "scaling" not in description:
        raise CheckpointNotFoundError(f"{folder.path_of('run.json')} does not say what the run was made with")
    arguments = {name: value for name, value in _arguments(description).items() if name not in changes}
    for name, value in arguments.items():
        if REDACTED in json.dumps(value, default=vars):
            raise ConfigError(f"the run's {name} has secrets that its files leave out; give restore({name}=...) again.")
    if description["failure"].get("on_resize") is not None and "failure" not in changes:
        raise ConfigError("the run had a FailureConfig(on_resize=...), a function; give restore(failure=...) again.")
    store = CheckpointStore(folder.child("checkpoints"))
    newest = store.newest()
    manifest = newest.manifest
    checkpoint = None if manifest is None else Checkpoint.of_manifest(store.path(manifest.number), manifest)
    passed_over = [f"checkpoint {each.number} passed over: {each.error}" for each in newest.passed_over]
    path, mark, options = folder.uri.partition("?")
    runs_uri = path.rstrip("/").rpartition("/")[0] + mark + options
    return Restored({**arguments, **changes}, runs_uri, checkpoint, passed_over)


def _arguments(description: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(description["scaling"])
    if isinstance(scaling["num_workers"], list):
        fewest, most = scaling["num_workers"]
        scaling["num_workers"] = (fewest, math.inf if most is None else most)
    failure = {name: value for name, value in description["failure"].items() if name != "on_resize"}
    run = RunConfig(storage_path=description["run"]["storage_path"], name=description["run"]["name"])
    return {
        **scaling,
        "backend": description["backend"],
        "backend_args": description["backend_config"],
        "runtime_env": description["runtime_env"] or None,
        "seed": description["seed"],
        "deterministic": description["deterministic"],
        "failure": FailureConfig(**failure),
        "checkpoint": CheckpointConfig(**description["checkpoint"]),
        "run": run,
    }


def _suggest(folder: Storage) -> str:
    runs = [name for name in folder.list_names() if _RUN.fullmatch(name)]
    if runs:
        return f"; did you mean {folder.path_of(max(runs))}?"
    return "" if folder.exists() else ", and is not there"
