"""Early stopping: end a run whose metric no longer improves. Runs in the controller's helper process, even without a driver."""

from __future__ import annotations

import math
from typing import Literal

from raysgd._util.metric_names import find_keys, flatten, listed, nearest, value_at
from raysgd.callbacks.base import Callback, Stop
from raysgd.callbacks.values import is_number, plain, short, split_automatic
from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.errors import ConfigError, MetricError, MissingMetricError
from raysgd.result import Event, Result, RunInfo


class EarlyStoppingCallback(Callback):
    """Raises `Stop` when ``metric`` has not improved for ``patience`` results that have it.

    In a run that resumes from a checkpoint, the results before it count too. Results without the metric do not count, so it may
    be reported every few iterations only. Iterations that are repeated after a failure count once. An infinite value is not an
    improvement. The callback is critical: the run ends with an error when the metric is nan or not a number, or has never been
    reported.

    Args:
        metric: Name of the metric; a nested one as ``val/loss``.
        mode: Whether the metric improves downwards, ``"min"``, or upwards, ``"max"``.
        patience: Number of results in a row without improvement after which the run ends.
        min_delta: An improvement must be larger than this.
        nan_is_failure: Whether nan ends the run with a ``FloatingPointError``. False: nan is not an improvement.
    """

    runs_in = "controller"
    critical = True

    _best: float  # of sign * value: smaller is better
    _best_iteration: int
    _waited: int
    _has_stopped: bool
    _seen: int
    _missing: str
    _may_be_short: bool

    def __init__(
        self,
        metric: str,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        *,
        nan_is_failure: bool = True,
    ) -> None:
        if not metric:
            raise ConfigError(f"EarlyStoppingCallback(metric={metric!r}) is empty; give the name of a metric.")
        self._metric = metric
        self._sign = 1 if check_choice("EarlyStoppingCallback(mode)", mode, ("min", "max")) == "min" else -1
        self._patience = check_count("EarlyStoppingCallback(patience)", patience, minimum=1)
        self._min_delta = check_amount("EarlyStoppingCallback(min_delta)", min_delta)
        self._nan_is_failure = nan_is_failure
        self._restart()

    def on_run_start(self, info: RunInfo) -> None:
        self._restart()
        for result in info.read_earlier():
            value = plain(value_at(result, keys)) if (keys := find_keys(result, self._metric)) is not None else None
            if isinstance(value, (int, float)) and is_number(value):
                self._improves(value, result["training_iteration"])

    def on_result(self, result: Result) -> None:
        iteration: int = result.get("training_iteration", self._seen + 1)
        if iteration <= self._seen:  # repeated after a failure
            return
        is_first, self._seen = self._seen == 0, iteration
        keys = find_keys(result, self._metric)
        if keys is not None:
            self._missing = ""
            self._judge(plain(value_at(result, keys)), iteration)
        elif is_first:
            self._may_be_short = iteration > 1  # the run resumed from a checkpoint
            names = flatten(split_automatic(result)[0])
            self._missing = f"{self._metric!r}{nearest(self._metric, names)}; it has {listed(names)}"
            self.warn(
                f"the first result has no metric {self._missing}. Until a result has it, early stopping does nothing; a run "
                "that ends without it raises a MissingMetricError."
            )

    def on_event(self, event: Event) -> None:
        self._may_be_short |= event.kind == "stop"

    def on_run_end(self, error: BaseException | None) -> None:
        if error is None and self._missing and not self._may_be_short:
            raise MissingMetricError(
                f"EarlyStoppingCallback did nothing, because no result had the metric {self._missing}. Training itself has "
                "succeeded: what train_func returned is this error's attribute `returned`.",
                key=self._metric,
            )

    def _restart(self) -> None:
        self._best = math.inf
        self._best_iteration = 0
        self._waited = 0
        self._has_stopped = False
        self._seen = 0
        self._missing = ""
        self._may_be_short = False

    def _judge(self, value: object, iteration: int) -> None:
        if not isinstance(value, (int, float)) or not is_number(value):
            raise MetricError(
                f"{self._metric}={value!r} is not a number; give EarlyStoppingCallback a metric that is one.",
                key=self._metric,
            )
        if math.isnan(value) and self._nan_is_failure:
            raise FloatingPointError(f"{self._metric} is nan at iteration {iteration}.")
        if not self._improves(value, iteration) and self._waited >= self._patience and not self._has_stopped:
            self._has_stopped = True  # raise once; the run takes a moment to end
            best = f"its best was {short(self._sign * self._best)} at iteration {self._best_iteration}"
            best = best if self._best_iteration else "it was never finite"
            raise Stop(f"{self._metric} has not improved for {self._waited} results; {best}, now {iteration}.")

    def _improves(self, value: float, iteration: int) -> bool:
        """Count a value; returns whether it is the best so far."""
        is_best = math.isfinite(value) and self._sign * value < self._best - self._min_delta
        if is_best:
            self._best, self._best_iteration, self._waited = self._sign * value, iteration, 0
        else:
            self._waited += 1
        return is_best
