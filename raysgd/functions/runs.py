"""`FunctionRuns`: the runs of JAX functions, on workers that stay up between them. Driver side."""

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
from raysgd.controller.requests import TrainerSpec
from raysgd.errors import RaySGDError
from raysgd.functions.tasks import EvalLossTask, FitTask, PredictTask
from raysgd.trainer.arguments import RunArguments
from raysgd.trainer.run_manager import RunManager


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
        spec: The settings of a `raysgd.Trainer`.
        callbacks: Makes the callbacks of each run.

    Attributes:
        spec: As above.
    """

    def __init__(self, spec: TrainerSpec, callbacks: RunCallbacks) -> None:
        self.spec = spec
        self._manager = RunManager(spec)
        self._callbacks = callbacks

    def run(
        self,
        task: FitTask | EvalLossTask | PredictTask,
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
        arguments = RunArguments(
            task, config, dict(dataset) or None, [*own, *callbacks], start, checkpoint_config=checkpoint_config
        )
        stream = None
        try:
            stream = self._manager.begin(arguments)
            return stream.get_returns()
        except KeyboardInterrupt:
            self._manager.interrupt(stream)
            raise

    @property
    def run_dir(self) -> str | None:
        """The folder of the latest run, or None."""
        return self._manager.latest.run_dir

    def list_checkpoints(self) -> dict[int, Checkpoint]:
        """Return the checkpoints of the latest run that are on storage, by number, when all are written."""
        newest = self._manager.latest.newest_checkpoint()
        stream = self._manager.latest.stream
        return {} if newest is None or stream is None else stream.checkpoints

    def delete_checkpoint(self, number: int) -> None:
        """Delete a checkpoint of the latest run. A failure is logged: the training has succeeded."""
        try:
            self._manager.latest.delete_checkpoint(number)
        except (RaySGDError, RayError) as error:
            get_logger().warning("checkpoint %d of %s could not be deleted: %s", number, self.run_dir, error)

    def shutdown(self) -> None:
        """End the workers and release their resources. May be called again."""
        self._manager.shutdown()

    def leave(self) -> None:
        """End a ``with`` block."""
        self._manager.leave()
