"""The progress of a declarative training, and whether a training with other settings can continue from it. Worker side.

Which checkpoint ``resume_from`` means is found in `raysgd.trainer.resume_from`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
