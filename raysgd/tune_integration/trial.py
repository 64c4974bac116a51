"""The runs of one Tune trial, one after another, in the process that Tune made for the trial."""

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

from raysgd.callbacks.progress.callback import default_callbacks
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller.requests import TrainerSpec
from raysgd.errors import ConfigError, RaySGDError, RunCancelledError
from raysgd.result import AUTOMATIC_KEYS, ENDED_BY_SEARCH, Result
from raysgd.trainer.arguments import RunArguments
from raysgd.trainer.run_manager import RunManager
from raysgd.trainer.stream import ResultStream
from raysgd.tune_integration.copies import Pruning, copy_checkpoint, uri_of
from raysgd.tune_integration.recipe import Recipe, Work
from raysgd.workers.pickling import Shared, loads
from raysgd.workers.placement.cluster import check_feasible

#: Seconds that a result waits for what may follow at once: a save, the next result, or the end.
_WAIT_FOR_NEXT_S = 0.25
#: The same after a save came later than that; and seconds to wait until a save is on storage.
_WAIT_FOR_SAVE_S = 10.0
#: Seconds for the callbacks and pending writes of a run that is ended early.
_END_S = 10.0
#: Seconds without a call from Tune after which the trial counts as abandoned: Tune paused it, or reuses its process.
_ABANDONED_S = 10.0
#: The same for a run without a checkpoint, which would have to start again if Tune called after all.
_ABANDONED_WITHOUT_CHECKPOINT_S = 60.0


class Saved(NamedTuple):
    """A checkpoint of a run, its number, and the round that it belongs to."""

    number: int
    round: int
    checkpoint: Checkpoint


class Trial:
    """A trial's live run, and the workers that stay started from one run to the next.

    Args:
        recipe: How its runs are made.
        parameters: The arguments of train_func from `ray.tune.with_parameters`.
    """

    def __init__(self, recipe: Recipe, parameters: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self._work: Work = ray.get(recipe.work)
        self._parameters = {name: Shared(ray.put(value)) for name, value in parameters.items()}
        self._runs: RunManager | None = None
        self._spec: TrainerSpec | None = None
        self._config: dict[str, Any] = {}
        self._resume_from: Any = None
        self._error: Exception | None = None
        self._stream: ResultStream | None = None
        self._set_stream(None)
        self._highest = 0
        self._last: Result | None = None
        self._lock = threading.Lock()
        self._is_called = False
        self._last_call_at = time.monotonic()
        threading.Thread(target=self._watch, name="raysgd-trial", daemon=True).start()

    def prepare(self, config: dict[str, Any], folder: Storage) -> None:
        """Set the config and the folder of the next run, and start its workers if they are not started yet.

        An error is raised by `next`, where Tune takes it as the trial's error.
        """
        self.end()
        self._config, self._resume_from, self._error = config, self._work.resume_from, None
        self._highest, self._last = 0, None
        try:
            self._check_parameters()
            spec = self._recipe.spec_for(config)
            if self._runs is None or spec != self._spec:
                self.close()
                check_feasible(spec.scaling, spec.failure_config.num_spares)
                keep_all = replace(spec.checkpoint_config, num_to_keep=None)  # `_prune` deletes what Tune has
                self._spec, self._runs = spec, RunManager(replace(spec, checkpoint_config=keep_all))
            self._runs.warm_up(uri_of(folder))
        except (RaySGDError, RayError) as error:
            self._error = error

    def resume_from(self, folder: Storage) -> tuple[int, float]:
        """End a live run, and start the next one from this checkpoint; return its round and the seconds of training before.

        Raises:
            CheckpointNotFoundError: The checkpoint was deleted.
            CheckpointCorruptError: A file of the checkpoint is missing or wrong.
        """
        found = Checkpoint.from_path(uri_of(folder))
        self.end()
        self._resume_from, self._highest, self._last = found, found.iteration, None
        return found.iteration, found.time_total_s

    def next(self) -> Result | None:
        """Wait for the next round that is new to Tune, and until its checkpoint is on storage; return None at the end.

        Raises:
            Exception: The error of the run.
        """
        if self._error is not None:
            raise self._error
        with self._called():
            while True:
                if self._stream is None:
                    self._set_stream(self._begin())
                stream = self._stream
                assert stream is not None
                for result in stream:
                    if result["training_iteration"] > self._highest:  # a lower one is repeated after a failure
                        self._highest, self._last = result["training_iteration"], result
                        self._wait_for_saves(stream)
                        return result
                if not self._is_abandoned:
                    return None
                self._restart_abandoned()

    @property
    def is_over(self) -> bool:
        """Whether the run has succeeded and Tune has all its results."""
        stream = self._stream
        return stream is not None and stream.error is None and stream.is_drained and not self._is_abandoned

    @property
    def has_new_checkpoint(self) -> bool:
        """Whether the rounds so far have a checkpoint that Tune does not have."""
        newest = self._newest()
        return newest is not None and newest.number > self._num_given

    def save_to(self, folder: Storage) -> dict[str, Any] | None:
        """Copy the newest checkpoint of the rounds so far into a folder; return its metrics, or None if there is none."""
        with self._called():
            newest = self._newest()
            if newest is None or self._stream is None:
                return None
            self._num_given = newest.number
            metrics = self._metrics_of(newest)
            copy_checkpoint(Storage.from_uri(str(newest.checkpoint.path)), folder, newest.round, metrics)
            self._prune(self._stream, self._num_given)
            return {**metrics, TRAINING_ITERATION: newest.round}

    def end(self) -> None:
        """End a live run early, without an error; its workers stay started."""
        with self._lock:
            stream = self._stream
            self._set_stream(None)
        if stream is not None:
            if stream.is_live:
                stream.cancel(ENDED_BY_SEARCH)
            if not stream.wait_closed(_END_S):
                self.close()
            self._prune(stream)

    def close(self) -> None:
        """End everything and release the resources."""
        with self._lock:
            stream = self._stream
            self._set_stream(None)
        runs, self._runs = self._runs, None
        if runs is not None:
            with contextlib.suppress(RayError):
                if stream is not None and stream.is_live:
                    stream.cancel(ENDED_BY_SEARCH)
                runs.shutdown()  # cancels a live run, and waits for its end
        if stream is not None:
            self._prune(stream)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _set_stream(self, stream: ResultStream | None) -> None:
        """Begin with a new run: reset what is known of the run before."""
        self._stream = stream
        self._num_given = 0  # number of the newest checkpoint that Tune has
        self._is_abandoned = False
        self._wait_s = _WAIT_FOR_NEXT_S
        self._last_seen = (0, 0)  # the last round that Tune got, and the newest checkpoint at that time
        self._not_awaited: set[int] = set()  # saves that did not reach storage in time

    def _begin(self) -> ResultStream:
        return self._run(self._work.dataset(self._config), self._config)

    def _run(self, dataset: Any, config: dict[str, Any]) -> ResultStream:
        assert self._runs is not None and self._spec is not None
        kept = self._spec.checkpoint_config
        self._pruning = Pruning(
            RetentionPolicy(kept.num_to_keep, kept.score_attribute, kept.score_order, kept.keep_best)
        )
        callbacks = default_callbacks(loads(self._work.callbacks), mode="off")  # Tune has a display of its own
        train_func = self._work.train_func.bind(self._parameters)
        return self._runs.begin(
            RunArguments(train_func, config, dataset, callbacks, self._resume_from, self._work.reduce)
        )

    def _wait_for_saves(self, stream: ResultStream) -> None:
        """Wait for the checkpoint of this round: Tune takes it with the result, but train_func may save after the report."""
        before, known = self._last_seen
        if any(number > known and of <= before for number, of in stream.rounds.items()):
            self._wait_s = _WAIT_FOR_SAVE_S  # the save came too late for its result
        stream.wait_save_or_next(self._highest, self._wait_s)
        wanted = {number for number, of in stream.saving.items() if of <= self._highest} - self._not_awaited
        stream.wait_saved(wanted, _WAIT_FOR_SAVE_S)
        self._not_awaited |= wanted.intersection(stream.saving)  # do not wait for these with each result
        self._last_seen = self._highest, max(stream.rounds, default=0)

    def _newest(self) -> Saved | None:
        """Return the newest checkpoint of the rounds so far, or of all rounds once the run is over."""
        return None if self._stream is None else newest(self._stream, math.inf if self.is_over else self._highest)

    def _metrics_of(self, saved: Saved) -> dict[str, Any]:
        if not saved.checkpoint.metrics and self._last is not None and saved.round == self._highest:
            return {name: value for name, value in self._last.items() if name not in AUTOMATIC_KEYS}
        return saved.checkpoint.metrics

    def _prune(self, stream: ResultStream, upto: float = math.inf) -> None:
        """Delete the checkpoints up to this number that the Trainer's ``CheckpointConfig`` does not keep."""
        if stream.run_dir is not None:
            passed = {number: found for number, found in stream.checkpoints.items() if number <= upto}
            with contextlib.suppress(RaySGDError):  # a checkpoint that stays only takes room
                self._pruning.prune(stream.run_dir, passed)

    # -- trials that Tune abandons ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        """Mark the time of a call of Tune: until a while after it, the trial does not count as abandoned."""
        self._is_called = True
        try:
            yield
        finally:
            self._is_called, self._last_call_at = False, time.monotonic()

    def _watch(self) -> None:
        """Cancel the run of an abandoned trial. Tune does not notify a process that its trial was paused or stopped."""
        while True:
            time.sleep(1)
            quiet_s = time.monotonic() - self._last_call_at
            with self._lock:
                stream = self._stream
                if stream is None or self._is_called or self._is_abandoned or not stream.is_live:
                    continue
                if quiet_s > (_ABANDONED_S if stream.checkpoints else _ABANDONED_WITHOUT_CHECKPOINT_S):
                    self._is_abandoned = True
                    with contextlib.suppress(RayError):
                        stream.cancel(ENDED_BY_SEARCH)

    def _restart_abandoned(self) -> None:
        """Start an abandoned run again from its newest checkpoint, since Tune asks for more results after all."""
        with self._lock:
            stream = self._stream
            was_cancelled = stream is not None and isinstance(stream.error, RunCancelledError)
            self._is_abandoned = False
        if stream is None or not was_cancelled:  # the run had ended by itself
            return
        stream.wait_closed(_END_S)
        found = newest(stream, math.inf)
        self._resume_from = self._resume_from if found is None else found.checkpoint
        self._set_stream(None)

    def _check_parameters(self) -> None:
        missing = [name for name in self._work.parameters if name not in self._parameters]
        if missing:
            raise ConfigError(
                f"train_func {self._work.train_func.name} needs {', '.join(missing)} in addition to the config; give "
                f"tune.with_parameters(trainable, {missing[0]}=...)."
            )


def newest(stream: ResultStream, upto: float) -> Saved | None:
    """Return the newest checkpoint of a run that belongs to a round up to this one."""
    found, rounds = stream.checkpoints, stream.rounds
    saved = [Saved(number, rounds.get(number, each.iteration), each) for number, each in found.items()]
    return max((one for one in saved if one.round <= upto), default=None)
