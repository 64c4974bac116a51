"""`search`: a Tuner with what a Trainer says already filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ray import tune

from raysgd.trainer.inside import spec_of_trainer
from raysgd.trainer.trainer import Trainer


def search(
    trainer: Trainer,
    train_func: Callable[..., Any],
    space: Mapping[str, Any],
    dataset: Any = None,
    *,
    metric: str | None = None,
    mode: str | None = None,
    num_samples: int = 1,
    search_alg: Any = None,
    scheduler: Any = None,
    max_concurrent_trials: int | None = None,
    time_budget_s: float | None = None,
    reuse_actors: bool = True,
    run_config: tune.RunConfig | None = None,
    **trainable: Any,
) -> tune.ResultGrid:
    """Search for the best config: `ray.tune.Tuner` over ``trainer.to_trainable(train_func, dataset)``, and nothing more.

    Trials follow each other in processes that are up, and as many of a trial's checkpoints are kept as the Trainer's
    ``CheckpointConfig`` says, unless ``run_config`` says otherwise.

    Args:
        trainer: Whose settings the trials have.
        train_func: As for `raysgd.Trainer.run`.
        space: The configs to search, as for `ray.tune.Tuner`.
        dataset: As for `raysgd.Trainer.to_trainable`.
        metric: What is to be best.
        mode: ``"max"`` or ``"min"``.
        num_samples: How often the space is sampled.
        search_alg: One of `ray.tune.search`; random and grid search by default.
        scheduler: One of `ray.tune.schedulers`; by default every trial runs to its end.
        max_concurrent_trials: As many as fit by default.
        time_budget_s: Seconds after which no trial goes on.
        reuse_actors: Whether trials follow each other in the same processes.
        run_config: Where files go, callbacks, and what else `ray.tune.RunConfig` has.
        **trainable: Further arguments of `raysgd.Trainer.to_trainable`.

    Raises:
        InfeasibleError: The cluster can never hold a trial.
        Exception: As of `raysgd.Trainer.to_trainable` and `ray.tune.Tuner.fit`. An error of a trial is in its result.
    """
    files = run_config or tune.RunConfig()
    kept = spec_of_trainer(trainer).checkpoint
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
