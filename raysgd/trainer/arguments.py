"""The arguments of a run, and their checks before anything of the run is started. Driver side."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import ray

from raysgd._util.text import with_article
from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from raysgd.config import CheckpointConfig, ScalingConfig


@dataclass(frozen=True)
class RunArguments:
    """The arguments of `raysgd.Trainer.run`, which documents them: as the user gave them, until they are checked.

    Attributes:
        checkpoint_config: Which checkpoints of this run are kept. None: as the Trainer's settings say.
    """

    train_func: Any
    config: Any = None
    dataset: Any = None
    callbacks: Any = ()
    resume_from: Any = None
    reduce: Any = None
    returns: Any = "first"
    checkpoint_config: CheckpointConfig | None = None


_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_train_func(function: Any) -> Callable[..., Any]:
    """Check that train_func can be called with one argument, the config, or with none.

    Raises:
        ConfigError: It cannot, or it is a coroutine or a generator function.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"train_func={function!r} is not a function; give a function train_func(config).")
    _check_plain(function, f"train_func {name}", "give a plain function and call raysgd.report in its loop")
    signature = _signature(function)
    if signature is None:
        return function  # type: ignore[no-any-return]
    kinds = {p.kind for p in signature.parameters.values()}
    if kinds == {inspect.Parameter.VAR_KEYWORD} and not isinstance(function, functools.partial):
        raise ConfigError(
            f"train_func {name}{signature} gets its config as one dict, not as keywords; write def {name}(config), and "
            "config['lr'] for a value."
        )
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in _STARS]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        wants = ", ".join(p.name for p in needed)
        raise ConfigError(
            f"train_func {name}{signature} needs {wants}, but it gets one argument, the config; "
            "put the others into the config, or bind them with functools.partial."
        )
    return function  # type: ignore[no-any-return]


def check_tuned_func(function: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Check a train_func for trials of Ray Tune; return it and the names of its arguments other than the config.

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
    """Check a function for `Trainer.execute`: it gets the worker's instance, or nothing if there are no instances.

    Raises:
        ConfigError: It cannot be called so, or it is a coroutine or a generator function.
    """
    if not callable(function):
        raise ConfigError(f"{method}() got {function!r}, which is not callable; give a function.")
    name = getattr(function, "__qualname__", repr(function))
    _check_plain(function, f"{method}() got {name}, which", "give a plain function")
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*([None] if has_instance else []))
    except TypeError as error:
        gets = (
            "one argument, the worker's instance" if has_instance else "no argument, since start() was given no class"
        )
        raise ConfigError(
            f"{method}() calls {name}{signature} with {gets}: {error}; bind other arguments with functools.partial."
        ) from None


def check_constructor(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a class for `Trainer.start`.

    Raises:
        ConfigError: The class cannot be called so, or it got a tuple and a dict that it also takes unpacked.
    """
    signature = _signature(cls)
    if signature is None:
        return
    given = (kwargs.get("args", ()), kwargs.get("kwargs", {})) if {*kwargs} <= {"args", "kwargs"} and kwargs else args
    is_pair = len(given) == 2 and isinstance(given[0], (tuple, list)) and isinstance(given[1], dict)
    if is_pair and not (args and kwargs) and _binds(signature, *given) is None:
        unpacked = [*map(reprlib.repr, given[0]), *(f"{name}={reprlib.repr(each)}" for name, each in given[1].items())]
        raise ConfigError(
            f"start() passes on to {cls.__name__}{signature} what follows the class; write "
            f"start({', '.join([cls.__name__, *unpacked])}). A tuple and a dict that are meant as such are given by name."
        )
    if (problem := _binds(signature, args, kwargs)) is not None:
        raise ConfigError(
            f"start() cannot make {cls.__name__}{signature}: {problem}; give its arguments after the class."
        )


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a call with these arguments fails, or None."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


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


def _is_any(function: Any, *checks: Callable[[Any], bool]) -> bool:
    """Return whether a check is true of the function, which may be a partial or an object with ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(check(plain) for check in checks for plain in (function, getattr(function, "__call__", None)))  # noqa: B004


def check_config(config: Any) -> dict[str, Any]:
    """Return the config as a new dict; None is an empty config.

    Raises:
        ConfigError: It is not a dict with string keys.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"config={config!r} is {with_article(type(config).__name__)}; give a dict.")
    for key in config:
        if not isinstance(key, str):
            raise ConfigError(f"config has the key {key!r}, {with_article(type(key).__name__)}; give strings as keys.")
    return dict(config)


def check_returns(returns: Any) -> str:
    """Check ``run(returns=...)``."""
    if returns not in ("first", "all"):
        raise ConfigError(f"returns={returns!r} is not known; give 'first' (rank 0's value) or 'all' (a list by rank).")
    return str(returns)


def plan_data(dataset: Any) -> DatasetPlan:
    """Resolve ``run(dataset=...)`` and put its rows into the object store; a lazy dataset is not executed yet.

    Raises:
        ConfigError: It cannot be a dataset.
        SerializationError: A map-style dataset does not pickle.
    """
    if dataset is None:
        return NO_DATASETS
    from raysgd.data.sources.resolve import resolve_datasets  # imports NumPy, which a run without data does not need

    here = ray.get_runtime_context()
    return resolve_datasets(dataset, ray.put, cast("Any", _Lazy), session=(here.get_node_id(), here.get_job_id()))


def resolve_data(dataset: Any, scaling: ScalingConfig) -> DatasetPlan:
    """Resolve ``run(dataset=...)``, or take a plan of `plan_data`, and start to execute its lazy datasets for one run.

    Raises:
        ConfigError: As `plan_data`, or the workers would leave no CPU to execute a lazy dataset.
        SerializationError: As `plan_data`.
    """
    plan = dataset if isinstance(dataset, DatasetPlan) else plan_data(dataset)
    lazy = {name: each for name, each in plan.sources.items() if each.blocks and isinstance(each.blocks[0], _Lazy)}
    if not lazy:
        return plan
    from raysgd.workers.dataset_stream import start_host

    check_cpu_for_dataset(scaling)
    given = {id(source.blocks[0]): source.blocks[0] for source in lazy.values()}  # a dataset may have several names
    started = {key: start_host(each.dataset) for key, each in given.items()}
    sources = {name: replace(source, blocks=(started[id(source.blocks[0])],)) for name, source in lazy.items()}
    return replace(plan, sources={**plan.sources, **sources})


@dataclass(frozen=True)
class _Lazy:
    """A lazy dataset that is not executed yet."""

    dataset: Any


def check_cpu_for_dataset(scaling: ScalingConfig) -> None:
    """Check that the largest group of workers leaves a CPU to execute a lazy dataset, which would wait for one forever.

    Raises:
        ConfigError: It leaves none.
    """
    bundle = scaling.bundle()
    each = bundle.get("CPU", 0.0)
    free = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    fit = [_num_fitting(node["Resources"], bundle) for node in ray.nodes() if node["Alive"]]
    workers = min(scaling.max_workers, sum(fit))
    if not each or workers < scaling.min_workers:
        return  # the workers take no CPU, or wait for nodes that are yet to come
    # The best case puts as many workers as possible on the fullest nodes. If no node has a CPU left then, none ever has.
    left, unplaced = [], workers
    for cpus, count in sorted(zip(free, fit, strict=True), key=lambda node: node[0] - node[1] * each):
        here = min(count, unplaced)
        unplaced -= here
        left.append(cpus - here * each)
    if max(left, default=0.0) < 1:
        raise ConfigError(
            f"the dataset is a lazy ray.data.Dataset, which Ray executes while the workers train, but they leave it no CPU: "
            f"{workers:g} workers of {each:g} CPUs take {workers * each:g} of the {sum(free):g} that the cluster has. Give "
            "fewer workers, or fewer CPUs to each (cpus_per_worker=...), or execute it before: ds.materialize()."
        )


def _num_fitting(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many workers fit on a node."""
    return int(min((node.get(name, 0.0) // amount for name, amount in bundle.items() if amount), default=0))
