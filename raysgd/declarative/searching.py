"""A search with Ray Tune over a declarative training: the section ``search``. Driver side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

from raysgd._util.logs import get_logger
from raysgd._util.text import with_article
from raysgd.callbacks.base import Callback
from raysgd.config.argument_names import nearest
from raysgd.declarative.args import ComponentConfig, SearchConfig, TrainerArgs, as_values
from raysgd.declarative.fields import FieldError
from raysgd.declarative.reading import SPACES, Tree, args_of, check_classes, merge
from raysgd.declarative.values import Importer
from raysgd.errors import ConfigError, TrainFuncError, UnknownArgumentError
from raysgd.trainer.trainer import Trainer

#: What a training reports after each step; with validation data also its loss.
_METRICS = ("train_loss", "gnorm", "lr", "rows", "train_wall", "step", "epoch")


def check_search(args: TrainerArgs) -> None:
    """Check the section ``search`` as far as that needs neither Ray nor torch.

    Raises:
        FieldError: It cannot work.
    """
    settings = args.search
    if settings is None:
        return
    base = as_values(replace(args, search=None))
    known = (*_METRICS, *(("val_loss", "val_wall") if args.dataset.val_args else ()))
    is_known = settings.metric is None or settings.metric in known or settings.metric.startswith("lr_")
    # Any other name may be that of a metric that a hook of the user reports.
    if not is_known and (close := nearest(str(settings.metric), known)):
        raise FieldError(
            ("search", "metric"), f"a training reports no {settings.metric!r}{close}; give one of {', '.join(known)}."
        )
    for name, value in settings.space.items():
        _check_field(name, base)
        _check_space(name, value)
        tried = next(iter(value.values())) if isinstance(value, Mapping) else value
        for each in tried if isinstance(tried, list) else ():
            _refuse_inner_space(name, each)
            try:
                check_classes(base, merge(base, {name: each}), [tuple(one.split(".")) for one in settings.space])
            except FieldError as error:
                raise FieldError(("search", "space", name), str(error)) from None


def search(
    args: TrainerArgs, settings: SearchConfig, training: Any, trainer: Trainer, callbacks: Sequence[Callback]
) -> dict[str, Any]:
    """Search; return the best value of all steps of all trials, its ``step`` and ``epoch``, and what was tried as ``config``.

    ``last`` is the last value of the same trial, ``checkpoint`` the path of a checkpoint of that step, or None. Failed trials,
    and values that are not finite, do not count.

    Raises:
        ConfigError: The section cannot work.
    """
    from raysgd.tune_integration import search as search_with_tune

    base = as_values(replace(args, search=None))
    with Tree().naming_places():
        check_search(args)
        space = {name: _space_of(name, as_values(value)) for name, value in settings.space.items()}
    importer = Importer(training.allowed, args)
    metric = settings.metric or ("val_loss" if args.dataset.val_args else "train_loss")
    with trainer:
        results = search_with_tune(
            cast(Any, trainer),
            replace(training, base=base, metric=metric),
            space,
            metric=metric,
            mode=settings.mode,
            num_samples=settings.num_samples,
            max_concurrent_trials=settings.max_concurrent_trials,
            time_budget_s=settings.time_budget_s,
            scheduler=_component(importer, settings.scheduler),
            search_alg=_component(importer, settings.search_alg),
            callbacks=[each for each in callbacks if each.runs_in != "driver"],
        )
    _check_trials(results)
    best, config = _best_of(results, metric, settings.mode)
    return {**best, "config": config}


def _best_of(results: Any, metric: str, mode: str) -> tuple[dict[str, Any], Any]:
    """Return what was reported with the best value, with the last value of its trial, its checkpoint, and its config.

    Raises:
        TrainFuncError: No trial that did not fail has reported a finite value.
    """
    found = []
    for each in results:
        rows = None if each.error is not None else each.metrics_dataframe
        if rows is None or metric not in rows:
            continue
        reported = rows[metric].notna()
        values = rows[metric].where(reported & (rows[metric].abs() < inf)).dropna()
        if len(values):
            at = values.idxmin() if mode == "min" else values.idxmax()
            row = {name: rows[name][at].item() for name in ("step", "epoch", metric) if name in rows}
            kept = (
                checkpoint.path for checkpoint, saved in each.best_checkpoints if saved.get("step") == row.get("step")
            )
            last = rows[metric][reported].iloc[-1].item()
            found.append(({**row, "last": last, "checkpoint": next(kept, None)}, each.config))
    if not found:
        raise TrainFuncError(
            f"no trial of the search has reported a finite {metric!r}: look at the trials in their folders."
        )
    return (min if mode == "min" else max)(found, key=lambda each: each[0][metric])


def _check_trials(results: Any) -> None:
    """Warn if trials have failed.

    Raises:
        TrainFuncError: All have.
    """
    if not results.errors:
        return
    error = results.errors[0]
    cause = getattr(error, "cause", None) or error  # Ray's error has the traceback in its text
    what = f"the first one by {type(cause).__name__}: {cause}"
    if results.num_errors == len(results):
        raise TrainFuncError(f"all trials of the search failed ({results.num_errors}), {what}")
    get_logger().warning("%d of %d trials of the search failed, %s", results.num_errors, len(results), what)


def _component(importer: Importer, given: ComponentConfig | None) -> Any:
    return None if given is None else importer.build(given.type, given.args)


def _space_of(name: str, value: Any) -> Any:
    """Return the space that is tried for a field."""
    from ray import tune

    if isinstance(value, list):
        return tune.choice(value)
    ((kind, given),) = value.items()
    make = getattr(tune, kind)
    try:
        if kind in ("choice", "grid_search"):
            return make(list(given))
        return make(**given) if isinstance(given, Mapping) else make(*given)
    except (TypeError, ValueError, AssertionError) as error:
        raise FieldError(
            ("search", "space", name), f"ray.tune.{kind} cannot be made with {given!r}: {error}."
        ) from None


def _check_space(name: str, value: Any) -> None:
    """Check that a value of the space is a list, or has the name of a function of ``ray.tune``."""
    if isinstance(value, list):
        return
    if not isinstance(value, Mapping) or len(value) != 1:
        raise FieldError(
            ("search", "space", name),
            f"{value!r} is {with_article(type(value).__name__)}; give a list, or one of {SPACES}.",
        )
    (kind,) = value
    if kind not in SPACES:
        raise FieldError(
            ("search", "space", name),
            f"{kind!r} is not a space{nearest(kind, SPACES)}; give a list, or one of {SPACES}.",
        )


def _refuse_inner_space(name: str, value: Any) -> None:
    """Refuse a function of ``ray.tune`` inside of a value that is tried; the component would get its name."""
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    if isinstance(value, Mapping) and len(inner) == 1 and isinstance(inner[0], list) and {*value} <= {*SPACES}:
        raise FieldError(
            ("search", "space", name),
            f"{value!r} is inside of a value that is tried, and only a whole field has a space: give it by the field's "
            "name, such as model.args.width: {randint: [1, 4]}.",
        )
    for each in inner:
        _refuse_inner_space(name, each)


def _check_field(name: str, base: Mapping[str, Any]) -> None:
    """Check that a field exists; arguments of components may be new."""
    try:
        args_of(merge(base, {name: None}))
    except UnknownArgumentError as error:
        text, close = str(error).partition(": ")[2].rstrip("."), nearest(name.rpartition(".")[2], SPACES)
        raise FieldError(("search", "space", name), f"{text}{close}.") from None
    except ConfigError:  # None is not what will be tried
        pass
