"""The one place where the objects of a run are built and wired together. Driver side."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import ray

from raysgd._util.imported import imported
from raysgd._util.redact import plain, redact, redact_arguments, secret_values
from raysgd.backends.base import BackendConfig
from raysgd.callbacks.base import Callback
from raysgd.callbacks.checks import check_callbacks
from raysgd.callbacks.defaults import default_callbacks
from raysgd.callbacks.print_ import PrintCallback
from raysgd.callbacks.progress import ProgressCallback
from raysgd.callbacks.runner import CallbackRunner
from raysgd.checkpoint.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.config.run import DEFAULT_STORAGE_PATH
from raysgd.controller.reader import CallbackReader
from raysgd.controller.reducing import check_reduce
from raysgd.controller.requests import RunRequest, TrainerSettings
from raysgd.errors import UsageError
from raysgd.result import RunInfo
from raysgd.trainer.channel import Channel
from raysgd.trainer.given import check_config, check_returns, check_train_func, resolve_data, resolve_start
from raysgd.trainer.restoring import describe_scaling
from raysgd.trainer.room import find_room
from raysgd.trainer.stream import ResultStream
from raysgd.workers.pickling import dumps_named

#: Pickles above this go through the object store instead of travelling in a call.
_INLINE_BYTES = 100 * 1024
_PACKAGES = ("raysgd", "ray", "numpy", "pyarrow", "torch")


@dataclass(frozen=True)
class TrainerSpec:
    """All a Trainer was given, checked."""

    scaling: ScalingConfig
    backend: BackendConfig
    run: RunConfig
    failure: FailureConfig
    checkpoint: CheckpointConfig
    runtime_env: Mapping[str, Any] | None = None
    seed: int | None = None
    deterministic: bool = False


def connect_ray(*, joins: bool = False) -> None:
    """Bring Ray up if it is not.

    Args:
        joins: A cluster must be there.

    Raises:
        UsageError: The driver is connected through Ray Client, or there is no cluster to join.
    """
    from ray.util.client import ray as client

    if client.is_connected():
        raise UsageError(
            "raysgd does not run through Ray Client (ray://): results are streamed to the driver's own process. Run the "
            "script on the cluster, for example with: ray job submit --address http://<head>:8265 -- python train.py"
        )
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto" if joins else None)
    except ConnectionError as error:
        what = (
            "there is no Ray cluster here to attach to" if joins else "the Ray cluster that is said to be here is not"
        )
        raise UsageError(f"{what}: {error}") from None


def owns_cluster() -> bool:
    """Whether the Ray cluster was started by this process, and ends with it."""
    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def make_settings(spec: TrainerSpec) -> TrainerSettings:
    """The TrainerActor's settings.

    Raises:
        InfeasibleError: The placement group that this process is in cannot hold the workers.
    """
    return TrainerSettings(
        name=f"{spec.run.name or 'trainer'}-{uuid.uuid4().hex[:8]}",
        scaling=spec.scaling,
        backend=spec.backend,
        failure=dataclasses.replace(spec.failure, on_resize=None),  # a function of the user's: it goes to the workers
        checkpoint=spec.checkpoint,
        runtime_env=spec.runtime_env,
        alias=spec.run.name if spec.run.detached else None,
        room=None if spec.run.detached else find_room(spec.scaling, spec.failure.spares),  # it outlives the group
        run=spec.run,
        seed=spec.seed,
        deterministic=spec.deterministic,
    )


def spec_of(settings: TrainerSettings) -> TrainerSpec:
    """What a Trainer was given, but for ``on_resize``, a function, which only its own driver has."""
    return TrainerSpec(
        settings.scaling,
        settings.backend,
        settings.run,
        settings.failure,
        settings.checkpoint,
        settings.runtime_env,
        settings.seed,
        settings.deterministic,
    )


def arguments_of(spec: TrainerSpec) -> dict[str, Any]:
    """The arguments of a Trainer that make this one."""
    scaling = spec.scaling
    return {
        "num_workers": scaling.num_workers,
        "backend": spec.backend,
        "backend_args": None,
        "cpus_per_worker": scaling.cpus_per_worker,
        "gpus_per_worker": scaling.gpus_per_worker,
        "resources_per_worker": scaling.resources_per_worker,
        "placement_strategy": scaling.placement_strategy,
        "runtime_env": spec.runtime_env,
        "seed": spec.seed,
        "deterministic": spec.deterministic,
        "run": spec.run,
        "failure": spec.failure,
        "checkpoint": spec.checkpoint,
    }


def runs_folder(spec: TrainerSpec, train_func: Any) -> str:
    """The folder for a Trainer's runs; named after its first train_func and the time if the user gave no name."""
    name = spec.run.name
    if name is None:
        readable = re.sub(r"[^A-Za-z0-9_-]+", "_", getattr(train_func, "__name__", "run")).strip("_") or "run"
        name = f"{readable[:60]}_{datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}_{uuid.uuid4().hex[:6]}"
    return Storage.from_uri(spec.run.storage_path or DEFAULT_STORAGE_PATH).child(name).uri


def begin_run(
    channel: Channel,
    spec: TrainerSpec,
    train_func: Any,
    config: Any,
    *,
    runs_uri: str,
    dataset: Any,
    callbacks: Sequence[Callback],
    checkpoint: Any,
    reduce: Any,
    returns: Any,
    on_problem: Callable[[str], None],
) -> ResultStream:
    """Check everything, start the run, and give its stream."""
    function, config = check_train_func(train_func), check_config(config)
    reduce, returns = check_reduce(reduce), check_returns(returns)
    check_callbacks(callbacks)
    start, state = resolve_start(checkpoint)
    shown = redact(plain(config))
    share = bytes if spec.run.detached else _share  # what this process puts into the object store ends with it
    shown_callbacks = callbacks if _is_in_trial() else default_callbacks(callbacks)
    by_place = _by_place(shown_callbacks, is_detached=spec.run.detached)
    request = RunRequest(
        run_id=uuid.uuid4().hex,
        runs_uri=runs_uri,
        code=share(_dump_code(function, config)),
        config=shown,
        start=start,
        initial_state=None if state is None else _share(dumps_named(state, "checkpoint")),  # may be large
        datasets=resolve_data(dataset, spec.scaling),
        returns=returns,
        reduce=reduce,
        seed=spec.seed,
        deterministic=spec.deterministic,
        worker_callbacks=_dump_callbacks(by_place["worker"]),
        host_callbacks=_dump_callbacks(by_place["controller"]),
        on_resize=_dump_on_resize(spec.failure.on_resize, share),
        description=_describe(spec, function),
        secrets=frozenset(secret_values([config, vars(spec.backend), spec.runtime_env or {}])),
    )
    info = RunInfo("", "", shown, spec.scaling.min_workers, spec.backend.name)

    def make_reader(stream: ResultStream) -> CallbackReader | None:
        if not by_place["driver"]:
            return None
        runner = CallbackRunner(by_place["driver"], on_problem)
        return CallbackReader(runner, info, reduce, stream.stop, error_of=lambda _: stream.error)

    channel.begin(request)
    return ResultStream(
        channel,
        request.run_id,
        reduce=reduce,
        returns=returns,
        make_reader=make_reader,
    )


def share_call(obj: Any, name: str) -> Any:
    """A function or class of the user's for the workers."""
    return _share(dumps_named(obj, name))


def _is_in_trial() -> bool:
    """Whether this is a function that Ray Tune runs: Tune has a display of its own."""
    sessions = imported("ray.train._internal.session")
    return sessions is not None and sessions.get_session() is not None


def _dump_code(function: Callable[..., Any], config: dict[str, Any]) -> bytes:
    dumps_named(config, "config")  # first by itself, so that the error names the key
    dumps_named(function, "train_func")
    return dumps_named((function, config), "train_func and its config")


def _share(data: bytes) -> Any:
    return data if len(data) <= _INLINE_BYTES else ray.put(data)


def _dump_callbacks(callbacks: list[Callback]) -> bytes | None:
    return dumps_named(callbacks, "callbacks") if callbacks else None


def _dump_on_resize(function: Any, share: Callable[[bytes], Any]) -> Any:
    return None if function is None else share(dumps_named(function, "on_resize"))


def _by_place(callbacks: Sequence[Callback], *, is_detached: bool) -> dict[str, list[Callback]]:
    """A detached run's go on when its driver is gone, but for what is displayed there."""
    places: dict[str, list[Callback]] = {"driver": [], "controller": [], "worker": []}
    for callback in callbacks:
        stays = (
            callback.runs_in != "driver" or not is_detached or isinstance(callback, (ProgressCallback, PrintCallback))
        )
        places[callback.runs_in if stays else "controller"].append(callback)
    return places


def _describe(spec: TrainerSpec, function: Any) -> dict[str, Any]:
    """What ``run.json`` says beside the config: enough to know what ran, and on what."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "train_func": getattr(function, "__qualname__", type(function).__name__),
        "command": redact_arguments(sys.argv),
        "seed": spec.seed,
        "deterministic": spec.deterministic,
        "runtime_env": plain(dict(spec.runtime_env or {})),
        "failure": plain(vars(spec.failure)),
        "checkpoint": plain(vars(spec.checkpoint)),
        "backend_config": plain(vars(spec.backend)),
        "scaling": describe_scaling(spec.scaling),
        "run": plain(vars(spec.run)),
    }
