"""Results as printed lines: the simplest callback there is. Runs in the driver."""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.callbacks.base import Callback
from raysgd.callbacks.formatting import duration, one_line, short
from raysgd.callbacks.values import flatten, split_automatic
from raysgd.config.checks import check_count
from raysgd.result import Result, RunInfo


def result_line(result: Result, metrics: Sequence[str] | None = None) -> str:
    """``iteration 12, 0:34  loss=0.1235  acc=0.9``: the user's metrics, or those asked for, in their order."""
    own, automatic = split_automatic(result)
    values = flatten(own)
    if metrics is not None:
        every = {**values, **automatic}
        values = {key: every[key] for key in metrics if key in every}
    head = f"iteration {automatic.get('training_iteration', '?')}, {duration(automatic.get('time_total_s') or 0)}"
    if (attempt := automatic.get("attempt", 1)) != 1:
        head += f", attempt {attempt}"
    return "  ".join([head, *(f"{key}={short(value)}" for key, value in values.items())])


class PrintCallback(Callback):
    """Prints one line per result.

    Args:
        metrics: Names of what to print, nested ones as ``val/loss``; None: every metric the user reported.
        every: Print each so-manieth iteration only.
        workers: Also print a line for each rank's own metrics.
    """

    def __init__(self, metrics: Sequence[str] | None = None, *, every: int = 1, workers: bool = False) -> None:
        self._metrics = None if metrics is None else tuple(metrics)
        self._every = check_count("PrintCallback(every)", every, minimum=1)
        self._workers = workers
        self._name = ""

    def on_run_start(self, info: RunInfo) -> None:
        self._name = info.name

    def on_result(self, result: Result) -> None:
        if result.get("training_iteration", 0) % self._every:
            return
        lines = [f"[{self._name}] {result_line(result, self._metrics)}"]
        if self._workers:
            for rank, metrics in zip(result.ranks, result.workers, strict=False):
                values = "  ".join(f"{key}={short(value)}" for key, value in flatten(metrics).items())
                lines.append(f"[{self._name}]   rank {rank}  {values}")
        print("\n".join(lines), flush=True)

    def on_run_end(self, error: BaseException | None) -> None:
        if error is not None:
            print(f"[{self._name}] failed: {one_line(error)}", flush=True)
