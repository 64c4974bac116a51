"""Checks of what the user gave to a run, before anything is started. Driver side."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import ray

from raysgd._util.wording import with_article
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.controller.shelf import Start
from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from raysgd.config import ScalingConfig
    from raysgd.data.stream import Stream


def check_train_func(function: Any) -> Callable[..., Any]:
    """A function of zero or one argument; further ones with defaults are fine.

    Raises:
        ConfigError: It is no such thing, or a coroutine or generator function.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"train_func={function!r} is no function; give a function train_func(config).")
    _check_plain(function, f"train_func {name}", "give a plain function and call raysgd.report in its loop")
    signature = _signature(function)
    if signature is None:
        return function  # type: ignore[no-any-return]
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in _STARS]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        wants = ", ".join(p.name for p in needed)
        raise ConfigError(
            f"train_func {name}{signature} needs {wants}; it gets one argument, the config. "
            "Put the others into the config, or bind them with functools.partial."
        )
    return function  # type: ignore[no-any-return]


def check_tuned_func(function: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A function for trials, and the names of what it needs beside the config.

    Raises:
        ConfigError: As `check_train_func`.
    """
    signature = _signature(function) if callable(function) and not isinstance(function, type) else None
    if signature is None:
        return check_train_func(function), ()
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in _STARS]
    further = [p.name for p in needed if p.kind is p.KEYWORD_ONLY] + [
        p.name for p in [p for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    ]
    check_train_func(functools.partial(function, **dict.fromkeys(further)) if further else function)
    return function, tuple(further)


def check_call(method: str, function: Any, has_instance: bool) -> None:
    """A function for `Trainer.execute`: of one argument, the worker's instance, or of none where there are no instances.

    Raises:
        ConfigError: It is no such thing, or a coroutine or generator function.
    """
    if not callable(function):
        raise ConfigError(f"{method}({function!r}) got no function.")
    name = getattr(function, "__qualname__", repr(function))
    _check_plain(function, f"{method}() got {name}, which", "give a plain function")
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*([None] if has_instance else []))
    except TypeError as error:
        gets = "one argument, the worker's instance" if has_instance else "no argument: start() was given no class"
        raise ConfigError(
            f"{method}() got {name}{signature}, which gets {gets} ({error}). Bind others with functools.partial."
        ) from None


def _check_plain(function: Any, subject: str, instead_of_generator: str) -> None:
    if _is_any(function, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        raise ConfigError(f"{subject} is async; give a plain function (it may use asyncio.run inside).")
    if _is_any(function, inspect.isgeneratorfunction):
        raise ConfigError(f"{subject} is a generator; {instead_of_generator}.")


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return None


def _is_any(function: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Whether a call of ``function`` is of one of the kinds: a function, one that is bound, an object with ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(kind(plain) for kind in kinds for plain in (function, getattr(function, "__call__", None)))  # noqa: B004


_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_config(config: Any) -> dict[str, Any]:
    """A dict with string keys; None is an empty one.

    Raises:
        ConfigError: It is none.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"config={config!r} is {with_article(type(config).__name__)}; give a dict.")
    for key in config:
        if not isinstance(key, str):
            raise ConfigError(f"config has the key {key!r}, {with_article(type(key).__name__)}; give strings.")
    return dict(config)


def check_returns(returns: Any) -> str:
    if returns not in ("first", "all"):
        raise ConfigError(f"returns={returns!r} is not known; give 'first' (rank 0's value) or 'all' (a list by rank).")
    return str(returns)


def resolve_start(checkpoint: Any) -> tuple[Start, Any]:
    """What ``run(checkpoint=...)`` means: where to start from, and a state to start with.

    Raises:
        CheckpointNotFoundError: There is none at the path.
        CheckpointCorruptError: Its manifest is not valid.
        ConfigError: It is none of these.
    """
    if checkpoint is None:
        return Start(), None
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = Checkpoint.from_path(checkpoint)
    if not isinstance(checkpoint, Checkpoint):
        if not isinstance(checkpoint, Mapping):
            raise ConfigError(
                f"run(checkpoint=...) got {with_article(type(checkpoint).__name__)}; "
                "give a Checkpoint, a path, or a state (a dict)."
            )
        return Start(), checkpoint
    if checkpoint.path is None:
        raise CheckpointError("run(checkpoint=...) got a Checkpoint that lives in memory only and has no path.")
    checkpoint = Checkpoint.from_path(checkpoint.path)
    return Start(checkpoint.path, checkpoint.iteration, checkpoint.time_total_s), None


def resolve_data(dataset: Any, scaling: ScalingConfig) -> DatasetPlan:
    """What ``run(dataset=...)`` means; its rows are put into the object store, where they stay as long as the plan.

    Raises:
        ConfigError: It is nothing that can be a dataset; or it is to be executed while it is read, and the workers would
            leave no CPU for that.
        SerializationError: A map-style dataset does not pickle.
    """
    if dataset is None:
        return NO_DATASETS
    if isinstance(dataset, DatasetPlan):
        return dataset
    from raysgd.data import resolve_datasets  # NumPy, for those who give data

    def start(lazy: Any) -> Stream:
        from raysgd.workers.data_streams import start_host

        check_room_beside(scaling)
        return start_host(lazy)

    here = ray.get_runtime_context()
    return resolve_datasets(dataset, ray.put, start, session=(here.get_node_id(), here.get_job_id()))


def plan_data(dataset: Any) -> DatasetPlan:
    """As `resolve_data`, for several runs: what is lazy is left to `start_streams` in each of them."""
    if dataset is None:
        return NO_DATASETS
    from raysgd.data import resolve_datasets

    here = ray.get_runtime_context()
    return resolve_datasets(dataset, ray.put, cast("Any", _Lazy), session=(here.get_node_id(), here.get_job_id()))


def start_streams(plan: DatasetPlan, scaling: ScalingConfig) -> DatasetPlan:
    """A run's own plan, whose lazy datasets are executed for it.

    Raises:
        ConfigError: The workers would leave no CPU for that.
    """
    lazy = {name: source for name, source in plan.sources.items() if source.kind == "stream"}
    if not lazy:
        return plan
    from raysgd.workers.data_streams import start_host

    check_room_beside(scaling)
    hosts = {id(source.blocks[0]): source.blocks[0] for source in lazy.values()}
    started = {key: start_host(given.dataset) for key, given in hosts.items()}
    sources = {name: replace(source, blocks=(started[id(source.blocks[0])],)) for name, source in lazy.items()}
    return replace(plan, sources={**plan.sources, **sources})


@dataclass(frozen=True)
class _Lazy:
    """A lazy dataset that is not executed yet."""

    dataset: Any


def check_room_beside(scaling: ScalingConfig) -> None:
    """That workers, as many as can be, leave a CPU for the execution of a dataset: it would wait for one for ever.

    Raises:
        ConfigError: They do not.
    """
    bundle = scaling.bundle()
    each = bundle.get("CPU", 0.0)
    free = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    fit = [_num_fitting(node["Resources"], bundle) for node in ray.nodes() if node["Alive"]]
    workers = min(scaling.max_workers, sum(fit))
    if not each or workers < scaling.min_workers:
        return  # they take none; or are to wait for nodes that will come
    # As many as can be on the fullest nodes: if there is no CPU left on any node then, there is none in any way.
    left, unplaced = [], workers
    for cpus, count in sorted(zip(free, fit, strict=True), key=lambda node: node[0] - node[1] * each):
        here = min(count, unplaced)
        unplaced -= here
        left.append(cpus - here * each)
    if max(left, default=0.0) < 1:
        raise ConfigError(
            f"the dataset is a lazy ray.data.Dataset, which Ray executes while the workers train, and they leave it no CPU: "
            f"{workers:g} workers of {each:g} CPUs take {workers * each:g} of the {sum(free):g} that the cluster has. Give "
            "fewer workers, or fewer CPUs each (cpus_per_worker=...), or execute it before: ds.materialize()."
        )


def _num_fitting(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many workers a node has room for."""
    return int(min((node.get(name, 0.0) // amount for name, amount in bundle.items() if amount), default=0))
