"""`FunctionRuns`: the runs of JAX functions, on the workers of one `raysgd.Trainer`. Driver side."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
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
from raysgd.errors import RaySGDError, RunCancelledError
from raysgd.functions.metrics import COMPILATIONS, TRAIN_LOSS
from raysgd.functions.tasks import EvalLossTask, ExportTask, FitTask, PredictTask
from raysgd.trainer.assembly import share_value
from raysgd.trainer.stream import ResultStream
from raysgd.trainer.trainer import Trainer, interrupt

#: Between two checkpoints of a run for calls of train(), which repeats the calls after the newest one if a worker dies.
_SAVE_EVERY_S, _SAVE_EVERY_EPOCHS = 5.0, 64


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


class TrainingByEpochs:
    """A live run to which the driver gives each epoch when it wants it, so that an epoch need not begin a run.

    Args:
        stream: The run, which stays an attribute.
        of: What the run is for: the trainer, and what else its calls have in common.
        began: The epoch and the step that it begins with.
        on_end: Called with what the run returned.

    Attributes:
        epoch: The next epoch.
    """

    def __init__(self, stream: ResultStream, of: Any, began: tuple[int, int], on_end: Callable[[Any], Any]) -> None:
        self.stream = stream
        self.of = of
        self.began = began
        self.epoch = epoch = began[0]
        self._on_end = on_end
        self._resumable_from = epoch, epoch  # the epochs after the newest two checkpoints
        self._saved_at = time.monotonic()

    def train(self, examples: Any) -> tuple[dict[str, Any], int]:
        """Train for an epoch; return its metrics, and how often the step was compiled. Errors as for `raysgd.Trainer.run`."""
        self._give(examples)
        compilations = 0
        for result in self.stream:
            compilations += COMPILATIONS in result
            if TRAIN_LOSS in result and result["epoch"] == self.epoch:
                self.epoch += 1
                return {name: result[name] for name in ("epoch", "step", TRAIN_LOSS)}, compilations
        self.stream.get_returns()  # raises the error that the run has ended with
        raise RunCancelledError("the run was ended before its epoch: call train() again.")

    def end(self) -> None:
        """End the run."""
        self._give(None)
        self._on_end(self.stream.get_returns())

    def find_saved(self, checkpoints: Sequence[Checkpoint]) -> tuple[dict[str, Any] | None, tuple[int, int]]:
        """Return the newest state that the run has saved, or None, with the epoch and the step that it continues with."""
        if not checkpoints:
            return None, self.began
        saved = checkpoints[-1].load()
        position = saved["progress"]["position"]
        return {"train_state": saved["train_state"]}, (int(position["epoch"]), int(position["steps"]))

    def _give(self, examples: Any) -> None:
        before, newest = self._resumable_from
        saves = time.monotonic() - self._saved_at > _SAVE_EVERY_S or self.epoch - newest >= _SAVE_EVERY_EPOCHS
        self.stream.give(self.epoch, share_value((examples, saves), "examples"), before)
        if saves:
            self._resumable_from, self._saved_at = (newest, self.epoch + 1), time.monotonic()


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
        self._by_epochs: TrainingByEpochs | None = None
        #: What the latest call of train() was for; None after another use of the workers.
        self.trained: Any = None
        atexit.register(_end_at_exit, weakref.ref(self))  # after Ray's own function, so it is called before that

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
        self.end_epochs()
        own = self._callbacks.make(with_loggers=isinstance(task, FitTask))
        return self.trainer.run(
            task,
            config,
            dataset=dict(dataset) or None,
            callbacks=[*own, *callbacks],
            resume_from=start,
            checkpoint_config=checkpoint_config,
        )

    def find_epochs(self, of: Any, begin: Callable[[], TrainingByEpochs]) -> TrainingByEpochs | None:
        """Return the live run for calls of train(); the second one in a row begins it, and another use of the workers ends it.

        Args:
            of: What the calls have in common; `trained` is what the call before was for.
            begin: Begins the run.
        """
        if self._by_epochs is not None and self._by_epochs.of != of:
            self.end_epochs()
        if self._by_epochs is None and self.trained == of:
            self._by_epochs = begin()
        return self._by_epochs

    def begin_epochs(
        self, task: FitTask, config: Mapping[str, Any], *, start: Any, checkpoint_config: CheckpointConfig
    ) -> ResultStream:
        """Begin the run of a task that takes epochs."""
        return self.trainer.run_generator(
            task,
            config,
            callbacks=self._callbacks.make(with_loggers=True),
            resume_from=start,
            checkpoint_config=checkpoint_config,
        )

    def end_epochs(self) -> None:
        """End the live run for calls of train(), if there is one. Errors are those of the run."""
        live, self._by_epochs, self.trained = self._by_epochs, None, None
        if live is not None:
            live.end()

    def drop_epochs(self, error: BaseException) -> None:
        """Forget the live run for calls of train(), which has failed, or which Ctrl-C ends."""
        live, self._by_epochs, self.trained = self._by_epochs, None, None
        if live is not None and isinstance(error, (KeyboardInterrupt, SystemExit)):
            interrupt(self.trainer, live.stream, error)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint of the latest run. A failure is logged: the training has succeeded."""
        try:
            self.trainer.delete_checkpoint(checkpoint)
        except (RaySGDError, RayError) as error:
            get_logger().warning("%s could not be deleted: %s", checkpoint.path, error)


def _end_at_exit(ref: weakref.ref[FunctionRuns]) -> None:
    """End a live run for calls of train() as a success, if the script has not closed its Deployer."""
    if (runs := ref()) is not None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            runs.end_epochs()
