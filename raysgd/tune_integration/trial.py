"""The runs of one Tune trial, one after another, in the process that Tune made for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.air.constants import TRAINING_ITERATION
from ray.exceptions import RayError

from raysgd.callbacks.progress import ProgressCallback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage import Storage
from raysgd.data.plan import DatasetPlan
from raysgd.errors import ConfigError, RaySGDError
from raysgd.result import Result
from raysgd.trainer.assembly import TrainerSpec
from raysgd.trainer.given import resolve_data, start_streams
from raysgd.trainer.inside import trainer_of_spec, warm_up
from raysgd.trainer.stream import ResultStream
from raysgd.trainer.trainer import Trainer
from raysgd.tune_integration.copies import Pruning, copy_checkpoint
from raysgd.tune_integration.recipe import Recipe, Work
from raysgd.workers.cluster import check_feasible
from raysgd.workers.pickling import loads

#: Seconds a result waits for what comes right after it: a save, the next result, the end.
_LOOK_S = 0.25
#: The same where a save has come later than that before; and seconds until what was saved is on storage.
_SAVE_S = 10.0
#: Seconds a run that is ended early has for its callbacks and what is being written.
_END_S = 10.0


class Trial:
    """A Trainer, warm from one run to the next, and its live run.

    Args:
        recipe: How its runs are made.
        parameters: What `ray.tune.with_parameters` gives.
    """

    def __init__(self, recipe: Recipe, parameters: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self._work: Work = ray.get(recipe.work)
        self._parameters = dict(parameters)
        self._trainer: Trainer | None = None
        self._spec: TrainerSpec | None = None
        self._config: dict[str, Any] = {}
        self._stream: ResultStream | None = None
        self._start: Any = None
        self._highest = 0
        self._given = 0  # number of the checkpoint that Tune has
        self._problem: Exception | None = None
        self._pruning: Pruning | None = None
        self._look_s = _LOOK_S
        self._without = (0, 0)  # the last round given to Tune, and the last checkpoint that was there then

    def prepare(self, config: dict[str, Any], folder: str) -> None:
        """Have the next run be one with this config; its workers' processes come up meanwhile, or are there.

        What cannot work is raised by `next`, where Tune makes it the trial's error.
        """
        self.end()
        self._config, self._start, self._problem = config, self._work.checkpoint, None
        self._highest = self._given = 0
        self._look_s, self._without = _LOOK_S, (0, 0)
        try:
            self._check_parameters()
            spec = self._recipe.spec_for(config)
            if self._trainer is None or spec != self._spec:
                self.close()
                check_feasible(spec.scaling, spec.failure.spares)
                keeps_all = replace(spec.checkpoint, num_to_keep=None)
                self._spec, self._trainer = spec, trainer_of_spec(replace(spec, checkpoint=keeps_all))
            warm_up(self._trainer, folder)
        except (RaySGDError, RayError) as problem:
            self._problem = problem

    def go_on_from(self, folder: Storage) -> tuple[int, float]:
        """Have the next run begin at this checkpoint; a live one ends. Its round, and seconds of training before it.

        Raises:
            CheckpointNotFoundError: It is there no more.
            CheckpointCorruptError: A file of it is missing or wrong.
        """
        found = Checkpoint.from_path(folder.uri)
        self.end()
        self._start, self._highest, self._given = found, found.iteration, 0
        return found.iteration, found.time_total_s

    def next(self) -> Result | None:
        """The next round that Tune has not had, when what was saved with it is on storage; None at the end.

        Raises:
            Exception: What the run ended with.
        """
        if self._problem is not None:
            raise self._problem
        if self._stream is None:
            self._stream = self._begin()
        for result in self._stream:
            if result["training_iteration"] > self._highest:  # others were made again, after a failure
                self._highest = result["training_iteration"]
                self._wait_for_saves(self._stream)
                return result
        return None

    @property
    def is_over(self) -> bool:
        """Whether all is known of the run, and it has succeeded."""
        stream = self._stream
        return stream is not None and stream.error is None and stream.is_drained

    @property
    def has_new_checkpoint(self) -> bool:
        """Whether there is one of the rounds so far that Tune has not got."""
        return self._newest()[0] > self._given

    def save_to(self, folder: Storage) -> dict[str, Any] | None:
        """Put the newest checkpoint of the rounds so far into a folder of Tune's; what was reported with it, None: no such."""
        self._given, found = self._newest()
        if found is None:
            return None
        copy_checkpoint(Storage.from_uri(str(found.path)), folder)
        if self._stream is not None:
            self._prune(self._stream, self._given)
        return {**found.metrics, TRAINING_ITERATION: found.iteration}

    def end(self) -> None:
        """End a live run early, in peace; its workers stay."""
        stream, self._stream = self._stream, None
        if stream is not None and stream.is_live:
            stream.cancel()
        if stream is not None and not stream.wait_closed(_END_S):
            self.close()
        if stream is not None:
            self._prune(stream)

    def close(self) -> None:
        """End everything and give the resources back."""
        stream, self._stream = self._stream, None
        trainer, self._trainer = self._trainer, None
        if stream is not None and stream.is_live:
            stream.cancel()
            stream.wait_closed(_END_S)
        if trainer is not None:
            with contextlib.suppress(RayError):
                trainer.shutdown()
        if stream is not None:
            self._prune(stream)

    def _wait_for_saves(self, stream: ResultStream) -> None:
        """Tune takes a checkpoint with a result: with this one, though train_func may make it after the report."""
        before, known = self._without
        if any(number > known and found.iteration <= before for number, found in stream.checkpoints.items()):
            self._look_s = _SAVE_S  # it came too late for its result
        stream.wait_save_or_next(self._highest, self._look_s)
        stream.wait_saved(self._highest, _SAVE_S)
        self._without = self._highest, max(stream.checkpoints, default=0)

    def _begin(self) -> ResultStream:
        assert self._spec is not None
        given = self._work.datasets
        if given is None or isinstance(given, DatasetPlan):
            return self._run(given and start_streams(given, self._spec.scaling), self._config)
        return self._run(resolve_data(given(self._config), self._spec.scaling), self._config)

    def _run(self, dataset: DatasetPlan | None, config: dict[str, Any]) -> ResultStream:
        assert self._trainer is not None
        assert self._spec is not None
        kept = self._spec.checkpoint
        self._pruning = Pruning(RetentionPolicy(kept.num_to_keep, kept.score_attribute, kept.score_order))
        callbacks = loads(self._work.callbacks)
        if not any(isinstance(callback, ProgressCallback) for callback in callbacks):
            callbacks.append(ProgressCallback(mode="off"))  # Tune has a display of its own
        return self._trainer.run_generator(
            self._work.train_func.bind(self._parameters),
            config,
            dataset=dataset,
            callbacks=callbacks,
            checkpoint=self._start,
            reduce=self._work.reduce,
        )

    def _prune(self, stream: ResultStream, upto: float = math.inf) -> None:
        """Delete what the Trainer's ``CheckpointConfig`` does not keep of these numbers."""
        if stream.run_dir is not None and self._pruning is not None:
            passed = {number: found for number, found in stream.checkpoints.items() if number <= upto}
            with contextlib.suppress(RaySGDError):  # they take room, and nothing else
                self._pruning.prune(stream.run_dir, passed)

    def _newest(self) -> tuple[int, Checkpoint | None]:
        """The newest checkpoint of the rounds so far, and its number; of all where no more rounds come."""
        upto = math.inf if self.is_over else self._highest
        return newest(self._stream, upto)

    def _check_parameters(self) -> None:
        missing = [name for name in self._work.needs if name not in self._parameters]
        if missing:
            raise ConfigError(
                f"train_func {self._work.train_func.name} needs {', '.join(missing)} beside the config: give "
                f"tune.with_parameters(trainable, {missing[0]}=...)."
            )


def newest(stream: ResultStream | None, upto: float = math.inf) -> tuple[int, Checkpoint | None]:
    """The newest checkpoint of a run among those up to a round, and its number; 0 without one."""
    found = {} if stream is None else stream.checkpoints
    numbers = [number for number, checkpoint in found.items() if checkpoint.iteration <= upto]
    return (max(numbers), found[max(numbers)]) if numbers else (0, None)
