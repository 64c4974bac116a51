"""Build the objects of a run and connect them: the one place that does. Driver side."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address  # no public API compares addresses

# No public API says which resources of a bundle this process has, or whether it is a driver.
from ray._private.worker import SCRIPT_MODE, global_worker
from ray.util import get_current_placement_group

from raysgd._util.imports import imported
from raysgd._util.logs import get_logger
from raysgd._util.redact import plain, redact, secret_values
from raysgd.callbacks.base import Callback, check_callbacks, check_packages
from raysgd.callbacks.progress.callback import ProgressCallback, default_callbacks
from raysgd.callbacks.progress.lines import PrintCallback
from raysgd.callbacks.runner import CallbackRunner
from raysgd.checkpoint.links import best_by
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import ScalingConfig
from raysgd.config.run import DEFAULT_STORAGE_PATH
from raysgd.controller import frames
from raysgd.controller.journal.callback_reader import CallbackReader
from raysgd.controller.journal.outcome import outcome_error
from raysgd.controller.kv_store import SENT
from raysgd.controller.requests import RunRequest, TrainerSettings, TrainerSpec
from raysgd.controller.rounds import check_reduce
from raysgd.controller.run_plan import Start
from raysgd.errors import InfeasibleError, SerializationError, UsageError
from raysgd.result import RunInfo
from raysgd.trainer.arguments import (
    RunArguments,
    check_config,
    check_returns,
    check_train_func,
    resolve_data,
)
from raysgd.trainer.channel import Channel
from raysgd.trainer.spec import describe_run
from raysgd.trainer.stream import ResultStream
from raysgd.workers.orders import WorkerTask
from raysgd.workers.pickling import dumps_call, dumps_named
from raysgd.workers.placement.capacity import describe_bundle, explain_full, list_slots, slot_bundle
from raysgd.workers.placement.cluster import check_node_here, use_token
from raysgd.workers.placement.slots import ExistingPlacement
from raysgd.workers.versions import own_versions

#: Pickles above this size go through the object store; smaller ones travel in the call.
_INLINE_BYTES = 100 * 1024
#: How Ray names the resources of a bundle that a process has.
_OF_BUNDLE = re.compile(r"(?P<name>.+)_group_(?P<index>\d+)_[0-9a-f]+")

#: What adds packages in a runtime environment of Ray.
_OF_PACKAGES = frozenset({"pip", "uv", "conda", "py_modules", "py_executable", "container", "image_uri"})


# -- the cluster and the TrainerActor ----------------------------------------------------------------------------------


def connect_ray(address: str | None = None, *, must_exist: bool = False) -> None:
    """Connect this process to Ray, if it is not connected yet.

    Args:
        address: ``RunConfig(ray_address=...)``, which says what happens.
        must_exist: Connect to a running cluster only; do not start one.

    Raises:
        UsageError: The driver is connected through Ray Client or to another cluster, or there is no cluster to connect to.
    """
    from ray.util.client import ray as client

    if client.is_connected():
        raise UsageError(
            "raysgd does not run through Ray Client (ray://): results are streamed to the driver's own process. Run the "
            "script on the cluster, for example with: ray job submit --address http://<head>:8265 -- python train.py"
        )
    if ray.is_initialized():
        _check_address(address)
        _install_sigterm_handler_again()
        return
    if address != "local":
        use_token()
    named = address or os.environ.get("RAY_ADDRESS", "auto")
    try:
        if named not in ("auto", "local") and "://" not in named:
            check_node_here(named)
        ray.init(address="auto" if must_exist else address)
        _install_sigterm_handler_again()
    except (ConnectionError, ValueError) as error:
        problem = "there is no Ray cluster here to attach to" if must_exist else "the Ray cluster cannot be reached"
        raise UsageError(f"{problem}: {error}") from None
    if not owns_cluster():
        nodes = [node for node in ray.nodes() if node["Alive"]]
        size = f"{ray.cluster_resources().get('CPU', 0):g} CPUs on {len(nodes)} node{'s' * (len(nodes) > 1)}"
        get_logger().info(
            "joined the Ray cluster at %s (%s); RAY_ADDRESS=local, or RunConfig(ray_address='local'), starts one of its own",
            ray.get_runtime_context().gcs_address,
            size,
        )


def _install_sigterm_handler_again() -> None:
    """Let Python's handler alone handle SIGTERM. Ray's core wraps it, and aborts the process three seconds after the signal."""
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _check_address(address: str | None) -> None:
    """Check that the cluster that this process is connected to is the one of ``RunConfig(ray_address=address)``.

    Raises:
        UsageError: It is another one.
    """
    if address in (None, "auto") or global_worker.mode != SCRIPT_MODE:  # in a trial of Tune, the search has chosen
        return
    here = ray.get_runtime_context().gcs_address
    if not (owns_cluster() if address == "local" else _resolve(address) == _resolve(here)):
        raise UsageError(
            f"this program is connected to the Ray cluster at {here}, not to RunConfig(ray_address={address!r}); call "
            "ray.shutdown() first, or leave ray_address out."
        )


def _resolve(address: Any) -> str:
    """Return an address with the number of its host in place of the name."""
    host, _, port = (canonicalize_bootstrap_address(address) or "").rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return f"{host}:{port}"


def owns_cluster() -> bool:
    """Return whether this process started the Ray cluster, which then ends with the process."""
    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def make_settings(spec: TrainerSpec) -> TrainerSettings:
    """Make the settings of the TrainerActor.

    Raises:
        InfeasibleError: The workers do not fit into the placement group that this process is in.
    """
    is_detached = spec.run_config.detached
    run_config = spec.run_config
    if is_detached and run_config.storage_path is not None:  # a driver that attaches may have another working directory
        run_config = replace(run_config, storage_path=Storage.from_uri(run_config.storage_path).uri)
    # The workers alone unpickle code of the user.
    failure_config = replace(spec.failure_config, on_resize=None, retry_on=())
    return TrainerSettings(
        name=f"{spec.run_config.name or 'trainer'}-{uuid.uuid4().hex[:8]}",
        spec=replace(spec, failure_config=failure_config, run_config=run_config),
        versions=own_versions(*SENT),
        # A detached Trainer outlives the placement group of this process.
        room=None if is_detached else find_room(spec.scaling, spec.failure_config.num_spares),
    )


def find_room(scaling: ScalingConfig, num_spares: int) -> ExistingPlacement | None:
    """Return the worker slots in this process's placement group, or None if children do not get its resources.

    Raises:
        InfeasibleError: The group is too small; the message has the numbers.
    """
    placement = get_current_placement_group()
    if placement is None:
        return None
    taken = _taken_by_bundle(global_worker.core_worker.resource_ids())  # type: ignore[attr-defined]
    free = [_subtract(bundle, taken.get(index, {})) for index, bundle in enumerate(placement.bundle_specs)]
    if (why := explain_full(scaling, free, num_spares)) is not None:
        bundle, count = describe_bundle(slot_bundle(scaling)), scaling.min_workers + num_spares
        raise InfeasibleError(
            f"this Trainer is made in a placement group, and its workers must fit into that group: it {why}. Give the group "
            f"{count} bundles of {bundle} in addition to what this process has. For a Tune function: "
            "tune.with_resources(function, "
            f"raysgd.tune_integration.trial_resources(num_workers={scaling.num_workers}))."
        )
    return ExistingPlacement(placement, tuple(list_slots(free, slot_bundle(scaling))))


def _taken_by_bundle(resource_ids: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return the resources of each bundle that this process has, by the bundle's index."""
    taken: dict[int, dict[str, float]] = {}
    for key, ids in resource_ids.items():
        if (found := _OF_BUNDLE.fullmatch(key)) is not None:
            taken.setdefault(int(found["index"]), {})[found["name"]] = sum(amount for _, amount in ids)
    return taken


def _subtract(bundle: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - taken.get(name, 0.0) for name, amount in bundle.items()}


# -- a run -------------------------------------------------------------------------------------------------------------


def runs_folder(spec: TrainerSpec, train_func: Any) -> str:
    """Return the URI of the folder for a Trainer's runs: its name, or that of its first train_func and the time."""
    name = spec.run_config.name
    if name is None:
        readable = re.sub(r"[^A-Za-z0-9_-]+", "_", getattr(train_func, "__name__", "run")).strip("_") or "run"
        name = f"{readable[:60]}_{datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}_{uuid.uuid4().hex[:6]}"
    return Storage.from_uri(spec.run_config.storage_path or DEFAULT_STORAGE_PATH).child(name).uri


def check_run(run: RunArguments) -> RunArguments:
    """Check the arguments of a run that need no cluster, before one is started for it; return them as `begin_run` takes them.

    Raises:
        ConfigError: An argument cannot work.
    """
    return replace(
        run,
        callbacks=check_callbacks(run.callbacks),
        train_func=check_train_func(run.train_func),
        config=check_config(run.config),
        reduce=check_reduce(run.reduce),
        returns=check_returns(run.returns),
    )


def begin_run(
    channel: Channel,
    spec: TrainerSpec,
    run: RunArguments,
    runs_uri: str,
    lease: object = None,
    *,
    resumes_in: str | None = None,
) -> ResultStream:
    """Start a run and return the stream of its results.

    Args:
        channel: The channel to the TrainerActor.
        spec: The settings of the Trainer.
        run: As `check_run` returns it.
        runs_uri: The folder that gets the run's folder.
        lease: The stream holds it.
        resumes_in: The folder that ``resume_from="last"`` means, if it is known.
    """
    callbacks = run.callbacks if _is_in_trial() else default_callbacks(run.callbacks)
    by_process = _split_by_process(callbacks, is_detached=spec.run_config.detached)
    check_packages(by_process["driver"])
    if not spec.run_config.detached and not _job_adds_packages():
        check_packages(by_process["controller"])  # the callback host is on this node, with the packages of this process
    if run.checkpoint_config is not None:
        spec = replace(spec, checkpoint_config=run.checkpoint_config)
    request = _make_request(spec, run, runs_uri, by_process, resumes_in)
    info = RunInfo("", "", request.config, spec.scaling.min_workers, spec.backend.name)
    channel.begin(request)
    return ResultStream(
        channel,
        request.run_id,
        reduce=request.reduce,
        returns=request.task.returns,
        make_reader=reader_maker(by_process["driver"], request.reduce),
        lease=lease,
        info=info,
    )


def reader_maker(
    callbacks: Sequence[Callback], reduce: Mapping[str, str]
) -> Callable[[ResultStream], CallbackReader | None]:
    """Return what makes the reader that calls these callbacks in this process with the frames of a stream."""

    def make_reader(stream: ResultStream) -> CallbackReader | None:
        if not callbacks:
            return None
        stream_of = weakref.ref(stream)  # callbacks do not keep a stream that nobody holds

        def stop(why: str, error: BaseException | None) -> None:
            if (held := stream_of()) is not None:
                held.stop(why, error)

        def error_of(outcome: dict[str, Any]) -> BaseException | None:
            return outcome_error(outcome) if (held := stream_of()) is None else held.error

        runner = CallbackRunner(callbacks, stream.warn)
        return CallbackReader(runner, stream.run_info, reduce, stop, error_of=error_of, ends_with=frames.RUN_CLOSED)

    return make_reader


def _make_request(
    spec: TrainerSpec,
    run: RunArguments,
    runs_uri: str,
    callbacks: Mapping[str, list[Callback]],
    resumes_in: str | None,
) -> RunRequest:
    start, state = Start(), None
    if run.resume_from is not None:
        from raysgd.trainer.resume_from import resolve_start  # not for a cold start

        start, state = resolve_start(run.resume_from, resumes_in, best_by(spec.checkpoint_config))
    # Objects that this process puts into the object store are lost when it ends, so a detached run gets bytes.
    share = bytes if spec.run_config.detached else _share
    on_resize, retry_on = spec.failure_config.on_resize, spec.failure_config.retry_on
    task = WorkerTask(
        run_id=uuid.uuid4().hex,
        code=share(_dump_code(run.train_func, run.config, _variables_of(spec))),
        returns=run.returns,
        seed=spec.seed,
        deterministic=spec.deterministic,
        logical_workers=spec.logical_workers,
        callbacks=_dump_callbacks(callbacks["worker"]),
        initial_state=None if state is None else _share(dumps_named(state, "resume_from")),  # may be large
        datasets=resolve_data(run.dataset, spec.scaling),
        on_resize=None if on_resize is None else share(dumps_named(on_resize, "on_resize")),
        retry_on=share(dumps_named(retry_on, "retry_on")) if retry_on else None,
    )
    return RunRequest(
        task=task,
        runs_uri=runs_uri,
        config=redact(plain(run.config)),
        start=start,
        reduce=run.reduce,
        host_callbacks=_dump_callbacks(callbacks["controller"]),
        description=describe_run(spec, run.train_func),
        secrets=frozenset(secret_values([run.config, vars(spec.backend), spec.runtime_env or {}])),
        checkpoint_config=spec.checkpoint_config,
    )


def share_call(obj: Any, name: str, spec: TrainerSpec) -> Any:
    """Pickle a function or a class of the user for the workers."""
    return _share(dumps_call(obj, name, _variables_of(spec)))


def share_value(value: Any, name: str) -> Any:
    """Pickle a value of the user for the workers of a live run."""
    return _share(dumps_named(value, name))


def _variables_of(spec: TrainerSpec) -> Collection[str]:
    variables: Collection[str] = (spec.runtime_env or {}).get("env_vars", ())
    return variables


def _is_in_trial() -> bool:
    """Return whether this process runs a function of Ray Tune, which has a display of its own."""
    sessions = imported("ray.train._internal.session")
    return sessions is not None and sessions.get_session() is not None


def _job_adds_packages() -> bool:
    """Return whether the job's runtime environment may give other processes packages that this one does not have."""
    return not _OF_PACKAGES.isdisjoint(ray.get_runtime_context().runtime_env)


def _dump_code(function: Callable[..., Any], config: dict[str, Any], variables: Collection[str]) -> bytes:
    try:
        return dumps_call((function, config), "train_func and its config", variables)
    except SerializationError:  # each by itself, so that the error names the key
        dumps_named(config, "config")
        dumps_named(function, "train_func")
        raise


def _share(data: bytes) -> Any:
    return data if len(data) <= _INLINE_BYTES else ray.put(data)


def _dump_callbacks(callbacks: list[Callback]) -> bytes | None:
    return dumps_named(callbacks, "callbacks") if callbacks else None


def _split_by_process(callbacks: Sequence[Callback], *, is_detached: bool) -> dict[str, list[Callback]]:
    """Split the callbacks by the process that calls them.

    The driver of a detached run may end first, so its callbacks move to the controller. What displays stays in the driver.
    """
    by_process: dict[str, list[Callback]] = {"driver": [], "controller": [], "worker": []}
    for callback in callbacks:
        moves = callback.runs_in == "driver" and not isinstance(callback, (ProgressCallback, PrintCallback))
        by_process["controller" if is_detached and moves else callback.runs_in].append(callback)
    return by_process
