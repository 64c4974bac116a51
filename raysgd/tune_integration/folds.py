"""A trial that cross-validates: one run for each fold, one after another on the same workers."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ray.air.constants import TRAINING_ITERATION

from raysgd.callbacks.values import numbers, split_automatic
from raysgd.checkpoint.storage.storage import Storage
from raysgd.data.plan import UNNAMED, DatasetPlan
from raysgd.errors import CheckpointCorruptError, ConfigError
from raysgd.result import Result
from raysgd.trainer.arguments import resolve_data
from raysgd.tune_integration.copies import copy_checkpoint
from raysgd.tune_integration.trial import Trial, newest

_DONE = "folds.json"


class FoldsTrial(Trial):
    """A trial whose rounds are the folds. A result has the mean over the finished folds of what each reported last."""

    def prepare(self, config: dict[str, Any], folder: Storage) -> None:
        super().prepare(config, folder)
        self._plan: DatasetPlan | None = None
        self._done: list[dict[str, float]] = []
        self._checkpoints: dict[int, Storage] = {}
        self._num_given = 0
        self._time_s = 0.0

    def next(self) -> Result | None:
        if self._error is not None:
            raise self._error
        plan = self._plan = self._plan or self._make_plan()
        if self.is_over:
            return None
        fold = len(self._done)
        with self._called():
            stream = self._run(_plan_of(plan, fold), {**self._config, "fold": fold})
            self._set_stream(stream)
            rounds = deque(stream, maxlen=1)
            if not rounds:
                raise ConfigError(
                    f"fold {fold} ended without a report; report the metrics of a fold in train_func, the last ones count."
                )
        if (found := newest(stream, math.inf)) is not None:
            self._checkpoints[fold] = Storage.from_uri(str(found.checkpoint.path))
        self._prune(stream)
        self._set_stream(None)
        last = rounds[0]
        self._time_s += last["time_total_s"]
        self._done.append(numbers_of(last))
        return Result({**summary(self._done), "fold": dict(last), TRAINING_ITERATION: fold + 1}, [], ())

    @property
    def is_over(self) -> bool:
        folds = None if self._plan is None else self._plan.folds
        return folds is not None and len(self._done) == len(folds)

    @property
    def has_new_checkpoint(self) -> bool:
        return len(self._done) > self._num_given

    def save_to(self, folder: Storage) -> dict[str, Any] | None:
        """Write the metrics of the finished folds and the newest checkpoint of each."""
        self._num_given = len(self._done)
        if not self._done:
            return None
        folder.delete_file(_DONE)
        for fold, source in self._checkpoints.items():
            self._checkpoints[fold] = folder.child(f"fold_{fold}")  # Tune may delete the one it was copied from
            copy_checkpoint(source, self._checkpoints[fold])
        folder.write_bytes(_DONE, json.dumps({"done": self._done, "time_total_s": self._time_s}).encode())
        return {TRAINING_ITERATION: self._num_given}

    def resume_from(self, folder: Storage) -> tuple[int, float]:
        try:
            found = json.loads(folder.read_bytes(_DONE))
            done, time_s = [dict(each) for each in found["done"]], float(found["time_total_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointCorruptError(
                f"{folder.path_of(_DONE)} was not written by a trial with cross_validate=True: {error}"
            ) from error
        self.end()
        self._done, self._time_s, self._num_given = done, time_s, len(done)
        saved = {fold: folder.child(f"fold_{fold}") for fold in range(len(done))}
        self._checkpoints = {fold: where for fold, where in saved.items() if where.exists()}
        return len(done), time_s

    def _make_plan(self) -> DatasetPlan:
        assert self._spec is not None
        plan = resolve_data(self._work.dataset(self._config), self._spec.scaling)
        check_folds(plan)
        return plan


def check_folds(plan: DatasetPlan) -> None:
    """Check that a dataset for ``cross_validate=True`` has folds.

    Raises:
        ConfigError: It has none.
    """
    if plan.folds is None:
        raise ConfigError(
            "cross_validate=True needs a dataset of (train, validation) pairs; make it by raysgd.data.to_cv."
        )


def summary(done: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the mean of each metric that all folds have, its standard deviation (over n) as ``<name>_std``, and ``folds``.

    Where a fold has nan or an infinity the mean shows that, and the standard deviation is nan.
    """
    found: dict[str, Any] = {"folds": len(done)}
    for name in (name for name in done[0] if all(name in each for each in done)):
        values = np.array([each[name] for each in done], np.float64)
        with np.errstate(all="ignore"):
            found[name], found[f"{name}_std"] = float(values.mean()), float(values.std())
    return found


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a fold's last result by name, ``val/acc`` for a nested one. They can be averaged."""
    return numbers(split_automatic(result)[0])


def _plan_of(plan: DatasetPlan, fold: int) -> DatasetPlan:
    assert plan.folds is not None
    names = plan.folds[fold]
    if isinstance(names, str):
        return replace(plan, sources={UNNAMED: plan.sources[names]}, folds=None)
    train, validation = names
    return replace(plan, sources={"train": plan.sources[train], "validation": plan.sources[validation]}, folds=None)
