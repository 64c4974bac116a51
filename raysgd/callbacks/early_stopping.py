"""Early stopping: end a run whose metric no longer improves. Runs in the controller's helper process, even without a driver."""

from __future__ import annotations

import math
from typing import Literal

from raysgd._util.logs import get_logger
from raysgd.callbacks.base import Callback, Stop
from raysgd.callbacks.values import flatten, is_number, short
from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.errors import ConfigError, MetricError
from raysgd.result import Result, RunInfo

#: Results without the metric after which a warning says so.
_ABSENT_BEFORE_WARNING = 10


class EarlyStoppingCallback(Callback):
    """Raises `Stop` when ``metric`` has not improved for ``patience`` results that have it.

    Results without the metric do not count, so it may be reported every few iterations only. Iterations that are repeated
    after a failure count once. An infinite value is not an improvement. The callback is critical: the run ends with an error
    when the metric is nan or not a number.

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
    _seen: int
    _absent: int | None

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

    def on_result(self, result: Result) -> None:
        iteration: int = result.get("training_iteration", self._seen + 1)
        if iteration <= self._seen:  # repeated after a failure
            return
        self._seen = iteration
        values = flatten(result)
        if self._metric in values:
            self._judge(values[self._metric], iteration)
        else:
            self._miss(list(values))

    def _restart(self) -> None:
        self._best = math.inf
        self._best_iteration = 0
        self._waited = 0
        self._seen = 0
        self._absent = 0

    def _judge(self, value: object, iteration: int) -> None:
        self._absent = None
        if not isinstance(value, (int, float)) or not is_number(value):
            raise MetricError(
                f"{self._metric}={value!r} is not a number; give EarlyStoppingCallback a metric that is one.",
                key=self._metric,
            )
        if math.isnan(value) and self._nan_is_failure:
            raise FloatingPointError(f"{self._metric} is nan at iteration {iteration}.")
        if math.isfinite(value) and self._sign * value < self._best - self._min_delta:
            self._best, self._best_iteration, self._waited = self._sign * value, iteration, 0
            return
        self._waited += 1
        if self._waited == self._patience:  # raise once; the run takes a moment to end
            best = f"its best was {short(self._sign * self._best)} at iteration {self._best_iteration}"
            best = best if self._best_iteration else "it was never finite"
            raise Stop(f"{self._metric} has not improved for {self._waited} results; {best}, now {iteration}.")

    def _miss(self, present: list[str]) -> None:
        if self._absent is None:
            return
        self._absent += 1
        if self._absent == _ABSENT_BEFORE_WARNING:
            message = (
                f"no result has had {self._metric!r}, so early stopping does nothing; they have {', '.join(present)}."
            )
            get_logger().warning(message)
