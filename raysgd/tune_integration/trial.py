"""The runs of one Tune trial, one after another, in the process that Tune made for it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray.air.constants import TRAINING_ITERATION
from ray.exceptions import RayError

from raysgd.callbacks.progress import ProgressCallback
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage import Storage
from raysgd.data.plan import DatasetPlan
from raysgd.errors import ConfigError, RaySGDError, RunCancelledError
from raysgd.result import AUTOMATIC_KEYS, Result
from raysgd.trainer.assembly import TrainerSpec
from raysgd.trainer.given import resolve_data, start_streams
from raysgd.trainer.inside import trainer_of_spec, warm_up
from raysgd.trainer.stream import ResultStream
from raysgd.trainer.trainer import Trainer
from raysgd.tune_integration.copies import Pruning, copy_checkpoint, uri_of
from raysgd.tune_integration.recipe import Recipe, Work
from raysgd.workers.cluster import check_feasible
from raysgd.workers.pickling import Shared, loads

#: Seconds a result waits for what comes right after it: a save, the next result, the end.
_LOOK_S = 0.25
#: The same where a save has come later than that before; and seconds until what was saved is on storage.
_SAVE_S = 10.0
#: Seconds a run that is ended early has for its callbacks and what is being written.
_END_S = 10.0
#: Seconds without a word from Tune after which it has left the trial: paused it, or keeps its process for another one.
_LEFT_S = 10.0
#: The same for a run that has no checkpoint to go on from, should it be asked again.
_LEFT_FOR_GOOD_S = 60.0


class Saved(NamedTuple):
    """A checkpoint of a run, and the round it belongs to."""

    number: int
    round: int
    checkpoint: Checkpoint


class Trial:
    """A Trainer, warm from one run to the next, and its live run.

    Args:
        recipe: How its runs are made.
        parameters: What `ray.tune.with_parameters` gives.
    """

    def __init__(self, recipe: Recipe, parameters: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self._work: Work = ray.get(recipe.work)
        self._parameters = {name: Shared(ray.put(value)) for name, value in parameters.items()}
        self._trainer: Trainer | None = None
        self._spec: TrainerSpec | None = None
        self._config: dict[str, Any] = {}
        self._start: Any = None
        self._problem: Exception | None = None
        self._stream: ResultStream | None = None
        self._set_stream(None)
        self._highest = 0
        self._last: Result | None = None
        self._lock = threading.Lock()
        self._is_asked = False
        self._asked_at = time.monotonic()
        threading.Thread(target=self._watch, name="raysgd-trial", daemon=True).start()

    def prepare(self, config: dict[str, Any], folder: Storage) -> None:
        """Have the next run be one with this config; its workers' processes come up meanwhile, or are there.

        What cannot work is raised by `next`, where Tune makes it the trial's error.
        """
        self.end()
        self._config, self._start, self._problem = config, self._work.checkpoint, None
        self._highest, self._last = 0, None
        try:
            self._check_parameters()
            spec = self._recipe.spec_for(config)
            if self._trainer is None or spec != self._spec:
                self.close()
                check_feasible(spec.scaling, spec.failure.spares)
                keeps_all = replace(spec.checkpoint, num_to_keep=None)
                self._spec, self._trainer = spec, trainer_of_spec(replace(spec, checkpoint=keeps_all))
            warm_up(self._trainer, uri_of(folder))
        except (RaySGDError, RayError) as problem:
            self._problem = problem

    def go_on_from(self, folder: Storage) -> tuple[int, float]:
        """Have the next run begin at this checkpoint; a live one ends. Its round, and seconds of training before it.

        Raises:
            CheckpointNotFoundError: It is there no more.
            CheckpointCorruptError: A file of it is missing or wrong.
        """
        found = Checkpoint.from_path(uri_of(folder))
        self.end()
        self._start, self._highest, self._last = found, found.iteration, None
        return found.iteration, found.time_total_s

    def next(self) -> Result | None:
        """The next round that Tune has not had, when what was saved with it is on storage; None at the end.

        Raises:
            Exception: What the run ended with.
        """
        if self._problem is not None:
            raise self._problem
        with self._asked():
            while True:
                if self._stream is None:
                    self._set_stream(self._begin())
                stream = self._stream
                assert stream is not None
                for result in stream:
                    if result["training_iteration"] > self._highest:  # others were made again, after a failure
                        self._highest, self._last = result["training_iteration"], result
                        self._wait_for_saves(stream)
                        return result
                if not self._was_left:
                    return None
                self._come_back()

    @property
    def is_over(self) -> bool:
        """Whether all is known of the run, and it has succeeded."""
        stream = self._stream
        return stream is not None and stream.error is None and stream.is_drained and not self._was_left

    @property
    def has_new_checkpoint(self) -> bool:
        """Whether there is one of the rounds so far that Tune has not got."""
        newest = self._newest()
        return newest is not None and newest.number > self._given

    def save_to(self, folder: Storage) -> dict[str, Any] | None:
        """Put the newest checkpoint of the rounds so far into a folder of Tune's; what was reported with it, None: no such."""
        with self._asked():
            newest = self._newest()
            if newest is None or self._stream is None:
                return None
            self._given = newest.number
            metrics = self._metrics_of(newest)
            copy_checkpoint(Storage.from_uri(str(newest.checkpoint.path)), folder, newest.round, metrics)
            self._prune(self._stream, self._given)
            return {**metrics, TRAINING_ITERATION: newest.round}

    def end(self) -> None:
        """End a live run early, in peace; its workers stay."""
        with self._lock:
            stream = self._stream
            self._set_stream(None)
        if stream is not None:
            if stream.is_live:
                stream.cancel()
            if not stream.wait_closed(_END_S):
                self.close()
            self._prune(stream)

    def close(self) -> None:
        """End everything and give the resources back."""
        with self._lock:
            stream = self._stream
            self._set_stream(None)
        trainer, self._trainer = self._trainer, None
        if stream is not None and stream.is_live:
            stream.cancel()
            stream.wait_closed(_END_S)
        if trainer is not None:
            with contextlib.suppress(RayError):
                trainer.shutdown()
        if stream is not None:
            self._prune(stream)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _set_stream(self, stream: ResultStream | None) -> None:
        """What is known of a run begins with it."""
        self._stream = stream
        self._given = 0  # number of the checkpoint that Tune has
        self._was_left = False
        self._look_s = _LOOK_S
        self._without = (0, 0)  # the last round given to Tune, and the last checkpoint that was there then
        self._given_up: set[int] = set()  # saves that were waited for in vain

    def _begin(self) -> ResultStream:
        assert self._spec is not None
        given = self._work.datasets
        if given is None or isinstance(given, DatasetPlan):
            return self._run(given and start_streams(given, self._spec.scaling), self._config)
        return self._run(resolve_data(given(self._config), self._spec.scaling), self._config)

    def _run(self, dataset: DatasetPlan | None, config: dict[str, Any]) -> ResultStream:
        assert self._trainer is not None and self._spec is not None
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

    def _wait_for_saves(self, stream: ResultStream) -> None:
        """Tune takes a checkpoint with a result: with this one, though train_func may make it after the report."""
        before, known = self._without
        if any(number > known and of <= before for number, of in stream.rounds.items()):
            self._look_s = _SAVE_S  # it came too late for its result
        stream.wait_save_or_next(self._highest, self._look_s)
        wanted = {number for number, of in stream.saving.items() if of <= self._highest} - self._given_up
        stream.wait_saved(wanted, _SAVE_S)
        self._given_up |= wanted.intersection(stream.saving)  # not to be waited for with each result
        self._without = self._highest, max(stream.rounds, default=0)

    def _newest(self) -> Saved | None:
        """The newest checkpoint of the rounds so far; of all where no more rounds come."""
        return None if self._stream is None else newest(self._stream, math.inf if self.is_over else self._highest)

    def _metrics_of(self, saved: Saved) -> dict[str, Any]:
        if not saved.checkpoint.metrics and self._last is not None and saved.round == self._highest:
            return {name: value for name, value in self._last.items() if name not in AUTOMATIC_KEYS}
        return saved.checkpoint.metrics

    def _prune(self, stream: ResultStream, upto: float = math.inf) -> None:
        """Delete what the Trainer's ``CheckpointConfig`` does not keep of these numbers."""
        if stream.run_dir is not None:
            passed = {number: found for number, found in stream.checkpoints.items() if number <= upto}
            with contextlib.suppress(RaySGDError):  # they take room, and nothing else
                self._pruning.prune(stream.run_dir, passed)

    # -- trials that Tune leaves --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Tune waits for something."""
        self._is_asked = True
        try:
            yield
        finally:
            self._is_asked, self._asked_at = False, time.monotonic()

    def _watch(self) -> None:
        """Tune tells no process that its trial is paused, or stopped while the process is kept: a run must not train on."""
        while True:
            time.sleep(1)
            quiet_s = time.monotonic() - self._asked_at
            with self._lock:
                stream = self._stream
                if stream is None or self._is_asked or self._was_left or not stream.is_live:
                    continue
                if quiet_s > (_LEFT_S if stream.checkpoints else _LEFT_FOR_GOOD_S):
                    self._was_left = True
                    with contextlib.suppress(RayError):
                        stream.cancel()

    def _come_back(self) -> None:
        """Tune asks on after all: what the run had done by then was given, and it goes on from its newest checkpoint."""
        with self._lock:
            stream = self._stream
            was_cancelled = stream is not None and isinstance(stream.error, RunCancelledError)
            self._was_left = False
        if stream is None or not was_cancelled:  # it had come to its end by itself
            return
        stream.wait_closed(_END_S)
        found = newest(stream, math.inf)
        self._start = self._start if found is None else found.checkpoint
        self._set_stream(None)

    def _check_parameters(self) -> None:
        missing = [name for name in self._work.needs if name not in self._parameters]
        if missing:
            raise ConfigError(
                f"train_func {self._work.train_func.name} needs {', '.join(missing)} beside the config: give "
                f"tune.with_parameters(trainable, {missing[0]}=...)."
            )


def newest(stream: ResultStream, upto: float) -> Saved | None:
    """The newest checkpoint of a run among those that belong to a round up to this one."""
    found, rounds = stream.checkpoints, stream.rounds
    saved = [Saved(number, rounds.get(number, each.iteration), each) for number, each in found.items()]
    return max((one for one in saved if one.round <= upto), default=None)
