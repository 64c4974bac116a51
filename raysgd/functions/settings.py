"""The settings of fit and predict, as the driver sends them to the workers. Any process, no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The settings that fit and predict have in common.

    Attributes:
        jax_seed: The seed of everything.
        n_model_shards: The number of devices that one copy of the parameters is sharded over.
        num_workers: The number of workers for which the rows of a batch are counted; an elastic group may have fewer.
        collate_per_worker: As for `raysgd.functions.Deployer`.
        start: The path of a checkpoint that has the parameters to begin with; None: they are the run's initial state.
    """

    jax_seed: int
    n_model_shards: int
    num_workers: int
    collate_per_worker: bool
    start: str | None = None


@dataclass(frozen=True, kw_only=True)
class FitSettings(TaskSettings):
    """The settings of fit; `raysgd.functions.Trainer.fit` describes those of the same name.

    Attributes:
        first_epoch: The epoch that the training begins with.
        last_epoch: The epoch that it ends before.
        steps_per_update: As for `raysgd.functions.worker.steps.Steps`.
        compute_dtype: As for `raysgd.functions.Trainer`, by name.
        argmin: Metrics of which the lowest is kept, as they were given.
        argmax: Metrics of which the highest is kept.
        folder: URI of the folder for evaluations, or None.
        takes_epochs: Whether the driver gives the examples of each epoch when it begins, and the end in place of the last one.
    """

    per_device_batch_size: int
    eval_per_device_batch_size: int
    first_epoch: int
    last_epoch: int
    accumulate_grad_batches: int
    steps_per_update: int | None
    has_eval: bool
    eval_loss: bool
    eval_sanity_check: bool
    save_every_n_steps: int | None
    save_opt_states: bool
    save_float_dtype: str | None
    compute_dtype: str | None
    argmin: tuple[str, ...]
    argmax: tuple[str, ...]
    folder: str | None
    takes_epochs: bool = False


@dataclass(frozen=True, kw_only=True)
class PredictSettings(TaskSettings):
    """The settings of predict."""

    per_device_batch_size: int
