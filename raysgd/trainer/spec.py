"""The settings of a Trainer: made from its arguments, written to ``run.json``, and read from there. Driver side.

`Trainer`, `Trainer.restore` and the trials of Ray Tune all get their settings here, so that each of them checks the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from raysgd._util.redact import REDACTED, plain, redact_arguments
from raysgd.backends.registry import resolve_backend
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.config.argument_names import TRAINER_HINTS, check_known
from raysgd.controller.journal.journal import read_description, suggest_run
from raysgd.controller.requests import TrainerSpec
from raysgd.errors import CheckpointNotFoundError, ConfigError

if TYPE_CHECKING:
    from raysgd.trainer.resume_from import FoundCheckpoint

_PACKAGES = ("raysgd", "ray", "numpy", "pyarrow", "torch")
#: Those arguments of `raysgd.Trainer` that are fields of its `ScalingConfig`.
_SCALING = tuple(each.name for each in fields(ScalingConfig))
#: Fields of `FailureConfig` that are code of the user, which is not written to files.
_CODE = ("on_resize", "retry_on")
#: The names of all arguments of `raysgd.Trainer`.
ARGUMENTS = (*_SCALING, "backend_args", *(each.name for each in fields(TrainerSpec) if each.name != "scaling"))


#: The command line of ``raysgd`` that this process executes; see `record_command_line`.
_command_line: list[str] = []


def record_command_line(words: Sequence[str]) -> None:
    """Record in ``run.json`` of all later runs of this process how ``raysgd restore`` starts them again.

    Args:
        words: The words after ``raysgd``, such as ``["run", "--num-workers", "2", "train.py"]``.
    """
    _command_line[:] = words


class TrainerLike(Protocol):
    """A `raysgd.Trainer`, for the package that it imports itself, which must not import it."""

    _spec: TrainerSpec

    def to_trainable(self, train_func: Callable[..., Any], dataset: Any = None, /, **options: Any) -> Any: ...


def make_spec(**arguments: Any) -> TrainerSpec:
    """Make the settings of a Trainer from the arguments of `raysgd.Trainer`, which documents them.

    Raises:
        ConfigError: An argument cannot work, or does not exist.
    """
    return change_spec(TrainerSpec(scaling=ScalingConfig(), backend=resolve_backend("torch", None)), arguments)


def change_spec(spec: TrainerSpec, arguments: Mapping[str, Any]) -> TrainerSpec:
    """Return the settings with these arguments of `raysgd.Trainer` in place of the earlier ones. Errors as for `make_spec`."""
    check_known("Trainer", arguments, ARGUMENTS, TRAINER_HINTS)
    scaling = {name: value for name, value in arguments.items() if name in _SCALING}
    changes = {name: value for name, value in arguments.items() if name not in _SCALING}
    if "backend" in changes or "backend_args" in changes:
        name = changes.get("backend", spec.backend.name)
        changes["backend"] = resolve_backend(name, changes.pop("backend_args", None))
    return replace(spec, scaling=replace(spec.scaling, **scaling), **changes)


# -- in run.json -------------------------------------------------------------------------------------------------------


def describe_run(spec: TrainerSpec, train_func: Any) -> dict[str, Any]:
    """Return what ``run.json`` says of the code, the versions and the settings of a run."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    path = spec.run_config.storage_path
    return {
        "versions": versions,
        "train_func": getattr(train_func, "__qualname__", type(train_func).__name__),
        "command": redact_arguments(sys.argv),
        "command_line": redact_arguments(_command_line),
        "folder": _current_folder(),
        "seed": spec.seed,
        "deterministic": spec.deterministic,
        "logical_workers": spec.logical_workers,
        "runtime_env": plain(dict(spec.runtime_env or {})),
        "scaling": plain({**vars(spec.scaling), "num_workers": _num_workers_to_json(spec.scaling)}),
        "backend_args": plain(vars(spec.backend)),
        "run_config": plain({**vars(spec.run_config), "storage_path": None if path is None else os.fspath(path)}),
        "failure_config": plain(vars(spec.failure_config)),
        "checkpoint_config": plain(vars(spec.checkpoint_config)),
    }


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _num_workers_to_json(scaling: ScalingConfig) -> Any:
    largest = None if math.isinf(scaling.max_workers) else scaling.max_workers
    return [scaling.min_workers, largest] if scaling.is_elastic else scaling.min_workers


def num_workers_from_json(value: Any) -> Any:
    """Return ``num_workers`` as an argument: JSON has a list for the tuple, and null for an infinite maximum."""
    return tuple(math.inf if each is None else each for each in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class RestoredRun:
    """The arguments and the newest checkpoint of a run, read from its folder.

    Attributes:
        arguments: The arguments of its Trainer, with the changes that were asked for.
        runs_uri: The folder that holds the run's folder, and gets the folder of the next run.
        found: The newest checkpoint that is whole.
    """

    arguments: dict[str, Any]
    runs_uri: str
    found: FoundCheckpoint


def restore_run(run_dir: str | os.PathLike[str], changes: Mapping[str, Any]) -> RestoredRun:
    """Read the settings of a run, and find its newest checkpoint that is whole.

    Args:
        run_dir: The run's folder, path or URI.
        changes: Arguments of `raysgd.Trainer` that replace those of the run.

    Raises:
        CheckpointNotFoundError: The folder is not that of a run.
        ConfigError: The run's files leave an argument out, a secret or a function, and it is not among the changes.
    """
    from raysgd.trainer.resume_from import find_newest_of_run  # not for a cold start

    folder = Storage.from_uri(run_dir)
    description = _read_description(folder)
    saved = {name: value for name, value in _arguments_from_json(description).items() if name not in changes}
    for name, value in saved.items():
        if REDACTED in json.dumps(value, default=vars):
            raise ConfigError(
                f"the run's {name} holds secrets, which its files leave out; give restore({name}=...) again."
            )
    for name in _CODE:
        if description["failure_config"].get(name) and "failure_config" not in changes:
            raise ConfigError(
                f"the run had a FailureConfig({name}=...), which is code of yours that its files leave out; "
                "give restore(failure_config=...) again."
            )
    path, mark, options = folder.uri.partition("?")
    runs_uri = path.rstrip("/").rpartition("/")[0] + mark + options
    return RestoredRun({**saved, **changes}, runs_uri, find_newest_of_run(folder))


def _read_description(folder: Storage) -> dict[str, Any]:
    if not folder.exists("run.json"):
        raise CheckpointNotFoundError(
            f"{folder.path_of('')} is not the folder of a run: it has no run.json{suggest_run(folder)}"
        )
    description = read_description(folder)
    if "scaling" not in description or "failure_config" not in description:
        raise CheckpointNotFoundError(
            f"{folder.path_of('run.json')} does not say how the run's Trainer was made; it is not a file of this version."
        )
    return description


def _arguments_from_json(description: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(description["scaling"])
    failure = {name: value for name, value in description["failure_config"].items() if name not in _CODE}
    run = description["run_config"]
    return {
        **scaling,
        "num_workers": num_workers_from_json(scaling["num_workers"]),
        "backend": description["backend"],
        "backend_args": description["backend_args"],
        "runtime_env": description["runtime_env"] or None,
        "seed": description["seed"],
        "deterministic": description["deterministic"],
        "logical_workers": description.get("logical_workers"),
        "failure_config": FailureConfig(**failure),
        "checkpoint_config": CheckpointConfig(**description["checkpoint_config"]),
        "run_config": RunConfig(storage_path=run["storage_path"], name=run["name"]),
    }
