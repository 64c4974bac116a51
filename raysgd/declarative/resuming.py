"""The progress of a declarative training, and whether a training with other settings can continue from it. Worker side.

Which checkpoint ``resume_from`` means is found in `raysgd.trainer.resume_from`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raysgd.declarative.args import TrainerArgs
from raysgd.errors import ConfigError
from raysgd.train.loop import LoopPosition


@dataclass
class TrainStatus(LoopPosition):
    """The progress of a training.

    Attributes:
        best_loss: The lowest validation loss of a checkpoint, or training loss if there is no validation.
    """

    best_loss: float = float("inf")

    @property
    def finished_train_steps(self) -> int:
        """Optimizer steps that are done."""
        return self.steps


def progress_of(
    args: TrainerArgs,
    order: Mapping[str, int | None],
    status: TrainStatus,
    metrics: Mapping[str, Any],
    val_loss: float | None,
    of_ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return what a checkpoint, or a live state, has in addition to the engine's state.

    Args:
        args: The training.
        order: Of the training data; see `raysgd.torch.rows.describe_order`.
        status: The progress.
        metrics: Of the newest step.
        val_loss: Of the newest validation.
        of_ranks: What belongs to each rank alone.
    """
    return {
        "order": order,
        "lr_scheduler_interval": None if args.lr_scheduler is None else args.lr_scheduler.interval,
        "train_status": asdict(status),
        "batches": {"rows_per_step": args.rows_per_step, "rows_per_batch": args.micro_batch_size},
        "newest_metrics": as_numbers(metrics),
        "val_loss": val_loss,
        "of_ranks": of_ranks,
    }


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Return metrics without tensors; counts stay integers."""
    return {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}


def check_interval(args: TrainerArgs, before: str | None) -> None:
    """Check that the scheduler counts what it has counted when it was saved.

    Raises:
        ConfigError: It does not.
    """
    settings = args.lr_scheduler
    if settings is not None and settings.interval != before:
        raise ConfigError(
            f"lr_scheduler.interval is {settings.interval!r}, and was {before!r} when the checkpoint was saved: the "
            f"scheduler has counted {before}s, so it cannot continue by the {settings.interval}. Give {before!r}."
        )


def find_epoch_steps(args: TrainerArgs, status: TrainStatus, saved: Mapping[str, int]) -> int:
    """Return the steps of the epoch that have the same rows as those that were done when it was saved.

    Raises:
        ConfigError: Steps of this size cannot continue there.
    """
    now, before = args.rows_per_step, saved["rows_per_step"]
    if not status.epoch_steps or now == before:
        return status.epoch_steps
    rows = status.epoch_steps * before
    if rows % now:
        raise ConfigError(
            f"the checkpoint was saved after {rows} rows of epoch {status.epoch}, in steps of {before} rows; steps of {now} "
            f"rows cannot continue there: give global_batch_size {before}, or one that divides {rows}."
        )
    return rows // now
