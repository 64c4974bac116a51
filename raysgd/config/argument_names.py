"""Refuse an argument that does not exist, and name the right one: the nearest, or what other libraries' name is called here.

The decorators keep the visible signature, so editors, type checkers and the reference show the arguments as they are.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from raysgd.errors import UnknownArgumentError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_GIVE_TO_TRAINER = "give {0}= to raysgd.Trainer(...)"
_GIVE_TO_RUN = "give {0}= to Trainer.run(...)"
_RUN_CONFIG = "give run_config=raysgd.RunConfig({0}=...)"
_FAILURE_CONFIG = "give failure_config=raysgd.FailureConfig({0}=...)"
_CHECKPOINT_CONFIG = "give checkpoint_config=raysgd.CheckpointConfig({0}=...)"
_NUM_NODES = "give the number of all workers as num_workers=; Ray places them on its nodes"
_IN_CONFIG = "give it to train_func, by Trainer.run(train_func, {{'{0}': ...}})"
_SCALING = (
    "there is no ScalingConfig; give num_workers=, cpus_per_worker=, gpus_per_worker=, resources_per_worker= and "
    "placement_strategy= to raysgd.Trainer(...) itself"
)


def _use(**names: str) -> dict[str, str]:
    """Return the hints to use the arguments with these names, by the names that others give them."""
    return {other: f"use {name}=" for name, others in names.items() for other in others.split()}


def _each(advice: str, names: str) -> dict[str, str]:
    """Return the same advice for each of these arguments."""
    return {name: advice.format(name) for name in names.split()}


#: What other libraries, and earlier drafts of this one, call the arguments of a Trainer.
TRAINER_HINTS = {
    **_use(
        num_workers="workers n_workers num_processes nproc_per_node world_size devices num_devices",
        cpus_per_worker="cpu_per_worker num_cpus_per_worker num_cpus",
        gpus_per_worker="gpu_per_worker num_gpus_per_worker num_gpus",
        resources_per_worker="resources",
        backend_args="backend_config torch_config horovod_config tensorflow_config jax_config",
        run_config="run",
        failure_config="failure",
        checkpoint_config="checkpoint",
    ),
    **_each("use gpus_per_worker=1", "use_gpu accelerator"),
    **_each(_NUM_NODES, "num_nodes nnodes"),
    "strategy": "call raysgd.torch.prepare_model in train_func, which wraps the model",
    "precision": "use torch.autocast in train_func",
    "scaling_config": _SCALING,
    "ScalingConfig": _SCALING,
    **_each(_RUN_CONFIG, "name storage_path detached ray_address"),
    "address": _RUN_CONFIG.format("ray_address"),
    "logdir": _RUN_CONFIG.format("storage_path"),
    **_each(_FAILURE_CONFIG, "max_failures num_spares"),
    "max_retries": _FAILURE_CONFIG.format("max_failures"),
    **_each(_CHECKPOINT_CONFIG, "num_to_keep"),
    **_each(_GIVE_TO_RUN, "train_func config dataset callbacks resume_from reduce"),
    **_each(_IN_CONFIG, "epochs max_epochs num_epochs batch_size lr"),
    "logger": _GIVE_TO_RUN.format("callbacks"),
    "train_loop_per_worker": _GIVE_TO_RUN.format("train_func"),
    "train_loop_config": _GIVE_TO_RUN.format("config"),
    "datasets": _GIVE_TO_RUN.format("dataset"),
    "resume_from_checkpoint": _GIVE_TO_RUN.format("resume_from"),
}

#: The same for `Trainer.run`, `Trainer.run_generator` and `Trainer.to_trainable`.
RUN_HINTS = {
    **_use(
        train_func="train_loop_per_worker train_fn training_function",
        config="train_loop_config train_config",
        dataset="datasets data",
        callbacks="callback",
        resume_from="checkpoint resume_from_checkpoint checkpoint_path",
        reduce="metrics_reduce",
    ),
    **_each("put the values into config=, which train_func gets", "args kwargs"),
    **_each(
        _GIVE_TO_TRAINER,
        "num_workers backend backend_args cpus_per_worker gpus_per_worker resources_per_worker placement_strategy "
        "runtime_env seed run_config failure_config",
    ),
    "workers": _GIVE_TO_TRAINER.format("num_workers"),
    "gpu_per_worker": _GIVE_TO_TRAINER.format("gpus_per_worker"),
    "use_gpu": "give gpus_per_worker=1 to raysgd.Trainer(...)",
    "scaling_config": _SCALING,
    "checkpoint_strategy": _GIVE_TO_TRAINER.format("checkpoint_config"),
}
#: What to do with any other argument of theirs.
RUN_OTHERWISE = "train_func gets its values in one dict, config={{'{0}': ...}}"

RUN_CONFIG_HINTS = {
    **_each(_GIVE_TO_TRAINER, "failure_config checkpoint_config"),
    **_each(_GIVE_TO_RUN, "callbacks"),
    **_use(storage_path="local_dir"),
    "storage_filesystem": "give the file system as a URI in storage_path=",
    "stop": "raise raysgd.Stop in a callback, or use raysgd.callbacks.EarlyStoppingCallback",
    "verbose": "give callbacks=[raysgd.callbacks.ProgressCallback(mode=...)] to Trainer.run(...)",
    "progress_reporter": "give callbacks=[raysgd.callbacks.ProgressCallback(mode=...)] to Trainer.run(...)",
}

FAILURE_CONFIG_HINTS = {
    **_use(max_failures="max_retries", num_spares="spares", retry_on="retry_exceptions"),
    "fail_fast": "use max_failures=0",
    "timeout_s": "use heartbeat_timeout_s=, progress_timeout_s= or start_timeout_s=",
}

CHECKPOINT_CONFIG_HINTS = {
    **_use(
        score_attribute="checkpoint_score_attribute metric",
        score_order="checkpoint_score_order mode",
        num_to_keep="max_to_keep save_total_limit",
    ),
    "checkpoint_frequency": "call raysgd.save_checkpoint in train_func as often as wanted",
    "checkpoint_at_end": "call raysgd.save_checkpoint at the end of train_func",
}


#: What other libraries call the methods of a Trainer.
METHOD_HINTS = {
    **_each("call trainer.run(train_func, config), which returns what train_func returned", "fit train launch"),
    **_each("read the results as they come from trainer.run_generator(...)", "results metrics"),
    "validate": "evaluate in train_func",
    "predict": "call the model that trainer.run(...) returned",
    "close": "call trainer.shutdown()",
    "remote": "a Trainer is not an actor of Ray; call trainer.run(train_func, config)",
}


#: The same for `raysgd.Engine.compose`.
COMPOSE_HINTS = {
    **_use(
        train_dataloader="dataloader loader train_loader dataset train_dataset",
        eval_dataloader="eval_loader val_loader val_dataloader valid_dataloader test_dataloader",
    ),
    **_each(
        "use lr_scheduler_fn=, a function that makes the scheduler of the optimizer that it is called with",
        "lr_scheduler scheduler scheduler_fn",
    ),
    "models": "make an Engine for each model",
    "optimizers": "make an Engine for each model and its optimizer",
}


def check_known(
    owner: str, given: Iterable[str], known: Collection[str], hints: Mapping[str, str], otherwise: str = ""
) -> None:
    """Check that the names of all given arguments are known; ``otherwise`` is the advice for a name that is like none.

    Raises:
        UnknownArgumentError: One is not; the message says what to use instead.
    """
    for name in given:
        if name in known:
            continue
        if name in hints:
            advice = f": {hints[name]}."
        elif hint := nearest(name, known):
            advice = f"{hint}."
        elif otherwise:
            advice = f": {otherwise.format(name)}."
        else:
            advice = f"; its arguments are {', '.join(sorted(known))}." if known else "; it takes none."
        raise UnknownArgumentError(f"{owner} has no argument {name!r}{advice}")


def refuse_unknown(owner: str, hints: Mapping[str, str] | None = None, otherwise: str = "") -> Callable[[F], F]:
    """Decorate a function so that an argument it does not have raises `UnknownArgumentError` with what to use instead.

    So does a value without a name for an argument that has to have one.

    Args:
        owner: The function's name in the message, such as ``Trainer.run``.
        hints: What to do instead, by the names that other libraries use.
        otherwise: What to do with an argument that is like none of the function's.
    """

    def decorate(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())
        known = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        known.discard("self")
        named = ", ".join(f"{each.name}=..." for each in parameters if each.kind is each.KEYWORD_ONLY)
        num_positional = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
        is_open = any(each.kind is each.VAR_POSITIONAL for each in parameters)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if named and not is_open and len(args) > num_positional:
                raise UnknownArgumentError(
                    f"{owner}({_shorten(args[num_positional])}) gives a value without its name; write {owner}({named}), with "
                    "those that you need."
                )
            check_known(owner, kwargs, known, hints or {}, otherwise)
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def refuse_unknown_fields(hints: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass, whose fields have to be named, as `refuse_unknown` decorates a function."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__init__ = refuse_unknown(cls.__name__, hints)(cls.__init__)  # type: ignore[method-assign]
        return cls

    return decorate


def _shorten(value: Any) -> str:
    return given if len(given := repr(value)) <= 80 and "\n" not in given else f"<{type(value).__name__}>"


def nearest(name: object, known: Collection[str], *, cutoff: float = 0.6) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name that is most like this one, or ``""``."""
    close = difflib.get_close_matches(str(name), [str(each) for each in known], n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""
