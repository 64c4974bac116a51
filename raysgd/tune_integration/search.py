"""`search`: a `ray.tune.Tuner` that takes its settings from a Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ray import tune

from raysgd.trainer.spec import TrainerLike


def search(
    trainer: TrainerLike,
    train_func: Callable[..., Any],
    space: Mapping[str, Any],
    dataset: Any = None,
    *,
    metric: str | None = None,
    mode: Literal["max", "min"] | None = None,
    num_samples: int = 1,
    search_alg: Any = None,
    scheduler: Any = None,
    max_concurrent_trials: int | None = None,
    time_budget_s: float | None = None,
    reuse_actors: bool = True,
    run_config: tune.RunConfig | None = None,
    **trainable: Any,
) -> tune.ResultGrid:
    """Search for the best config: run a `ray.tune.Tuner` over ``trainer.to_trainable(train_func, dataset)``.

    Trials reuse the processes of earlier trials. The Trainer's ``CheckpointConfig`` says how many checkpoints of a trial are
    kept, unless ``run_config`` says otherwise.

    Args:
        trainer: The `raysgd.Trainer` whose settings the trials have.
        train_func: As for `raysgd.Trainer.run`.
        space: The configs to search, as for `ray.tune.Tuner`.
        dataset: As for `raysgd.Trainer.to_trainable`.
        metric: The metric to optimize.
        mode: ``"max"`` or ``"min"``.
        num_samples: Number of samples of the space.
        search_alg: One of `ray.tune.search`. None: random and grid search.
        scheduler: One of `ray.tune.schedulers`. None: every trial runs to its end.
        max_concurrent_trials: Trials at the same time. None: as many as fit.
        time_budget_s: Seconds after which the search ends.
        reuse_actors: Whether trials reuse the processes of earlier trials.
        run_config: Where files go, callbacks, and the other settings of `ray.tune.RunConfig`.
        **trainable: Further arguments of `raysgd.Trainer.to_trainable`.

    Raises:
        InfeasibleError: The cluster can never hold a trial.
        Exception: As for `raysgd.Trainer.to_trainable` and `ray.tune.Tuner.fit`. A trial's error is in its result instead.
    """
    files = run_config or tune.RunConfig()
    kept = trainer._spec.checkpoint_config
    if files.checkpoint_config in (None, tune.CheckpointConfig()):
        files = dataclasses.replace(
            files,
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=kept.num_to_keep,
                checkpoint_score_attribute=kept.score_attribute,
                checkpoint_score_order=kept.score_order,
            ),
        )
    tuner = tune.Tuner(
        trainer.to_trainable(train_func, dataset, **trainable),
        param_space=dict(space),
        tune_config=tune.TuneConfig(
            metric=metric,
            mode=mode,
            num_samples=num_samples,
            search_alg=search_alg,
            scheduler=scheduler,
            max_concurrent_trials=max_concurrent_trials,
            time_budget_s=time_budget_s,
            reuse_actors=reuse_actors,
        ),
        run_config=files,
    )
    return tuner.fit()
