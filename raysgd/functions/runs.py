"""`FunctionRuns`: the runs of JAX functions, on the workers of one `raysgd.Trainer`. Driver side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from raysgd._util.logs import get_logger
from raysgd.callbacks.base import Callback
from raysgd.callbacks.progress.callback import ProgressCallback
from raysgd.callbacks.tensorboard import TensorBoardCallback
from raysgd.callbacks.wandb import WandbCallback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.config import CheckpointConfig
from raysgd.config.checks import check_bool
from raysgd.errors import RaySGDError
from raysgd.functions.tasks import EvalLossTask, ExportTask, FitTask, PredictTask
from raysgd.trainer.trainer import Trainer


class RunCallbacks:
    """Makes the callbacks of a run; each run has its own."""

    def __init__(self, tensorboard: bool, wandb: bool, wandb_init: Mapping[str, Any] | None, verbose: bool) -> None:
        for name, value in (("run_tensorboard", tensorboard), ("run_wandb", wandb), ("verbose", verbose)):
            check_bool(name, value)
        self._tensorboard = tensorboard
        self._wandb = dict(wandb_init or {}) if wandb or wandb_init is not None else None
        self._verbose = verbose

    def make(self, *, with_loggers: bool) -> list[Callback]:
        made: list[Callback] = []
        if with_loggers and self._tensorboard:
            made.append(TensorBoardCallback())
        if with_loggers and self._wandb is not None:
            made.append(WandbCallback(**self._wandb))
        if not self._verbose:
            made.append(ProgressCallback(mode="off"))
        return made


class FunctionRuns:
    """Runs tasks on the workers of a `Deployer`.

    Args:
        trainer: Has the workers.
        callbacks: Makes the callbacks of each run.

    Attributes:
        trainer: As above.
    """

    def __init__(self, trainer: Trainer, callbacks: RunCallbacks) -> None:
        self.trainer = trainer
        self._callbacks = callbacks

    def run(
        self,
        task: FitTask | EvalLossTask | ExportTask | PredictTask,
        config: Mapping[str, Any],
        dataset: Mapping[str, Any],
        *,
        start: Any = None,
        callbacks: Sequence[Callback] = (),
        checkpoint_config: CheckpointConfig | None = None,
    ) -> Any:
        """Run a task and return its result on rank 0. Errors as for `raysgd.Trainer.run`.

        Args:
            task: The train_func.
            config: What the run's files and loggers show.
            dataset: Datasets by name.
            start: The state, or checkpoint, that the run begins with.
            callbacks: Further callbacks.
            checkpoint_config: Which checkpoints are kept.
        """
        own = self._callbacks.make(with_loggers=isinstance(task, FitTask))
        return self.trainer.run(
            task,
            config,
            dataset=dict(dataset) or None,
            callbacks=[*own, *callbacks],
            resume_from=start,
            checkpoint_config=checkpoint_config,
        )

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint of the latest run. A failure is logged: the training has succeeded."""
        try:
            self.trainer.delete_checkpoint(checkpoint)
        except (RaySGDError, RayError) as error:
            get_logger().warning("%s could not be deleted: %s", checkpoint.path, error)
