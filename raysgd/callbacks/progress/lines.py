"""Show a run's progress as plain lines, for logs, pipes and CI. Runs in the driver, in the thread that reads the stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from raysgd._util.redact import redact_uri
from raysgd.callbacks.base import Callback
from raysgd.callbacks.progress.state import note_text
from raysgd.callbacks.values import duration, end_state, flatten, one_line, short, split_automatic
from raysgd.config.checks import check_count
from raysgd.result import Event, Result, RunInfo

_EVERY_S = 1.0


def result_line(result: Result, metrics: Sequence[str] | None = None) -> str:
    """Format a result as ``iteration 12, 0:34  loss=0.1235  acc=0.9``, with all user metrics or those in ``metrics``."""
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
        metrics: Names of the metrics to print; a nested one as ``val/loss``. None: every metric of the user.
        every: Print every n-th iteration only.
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
        _print(lines)

    def on_run_end(self, error: BaseException | None) -> None:
        if error is not None:
            _print([f"[{self._name}] failed: {one_line(error)}"])


class LinesDisplay:
    """Prints one line per result, at most one a second; the last result is always printed.

    A result that came too soon is held until a later result or event, or until the end. Each line says how many results
    before it were skipped.

    Args:
        info: The run.
        file: Where to write. None: ``sys.stdout`` at the time.
        clock: Returns monotonic seconds.
    """

    def __init__(self, info: RunInfo, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._info = info
        self._file = file
        self._clock = clock
        self._start_at = self._next_at = clock()
        self._waiting: Result | None = None
        self._num_skipped = 0
        self._num_results = 0

    def start(self) -> None:
        info = self._info
        workers = "1 worker" if info.num_workers == 1 else f"{info.num_workers} workers"
        self._print(f"started with {workers}, {info.backend}; files in {redact_uri(info.run_dir)}")

    def result(self, result: Result) -> None:
        self._num_results += 1
        if self._waiting is not None:
            self._num_skipped += 1
        self._waiting = result
        if self._clock() >= self._next_at:
            self._show_waiting()

    def event(self, event: Event) -> None:
        text = _event_text(event)
        if text or self._clock() >= self._next_at:
            self._show_waiting()
        if text:
            self._print(text)

    def end(self, error: BaseException | None) -> None:
        self._show_waiting()
        took = duration(self._clock() - self._start_at)
        reason = "" if error is None else f": {one_line(error)}"
        self._print(f"{end_state(error)} after {took}, {self._num_results} results{reason}")

    def _show_waiting(self) -> None:
        result, self._waiting = self._waiting, None
        if result is None:
            return
        skipped, self._num_skipped = self._num_skipped, 0
        self._next_at = self._clock() + _EVERY_S
        note = f"  ({skipped} results before it not shown)" if skipped else ""
        self._print(f"{result_line(result)}{note}")

    def _print(self, text: str) -> None:
        _print([f"[{self._info.name}] {text}"], self._file)


def _print(lines: list[str], file: TextIO | None = None) -> None:
    """Print in one write, since a line that the program prints meanwhile would come between a text and the end of its line."""
    print("".join(f"{line}\n" for line in lines), end="", file=file or sys.stdout, flush=True)


def _event_text(event: Event) -> str:
    if event.kind == "warning":
        return f"warning: {event.data.get('message', '')}"
    if event.kind == "attempt_start" and event.data.get("attempt", 1) != 1:
        return f"attempt {event.data['attempt']} with {event.data.get('world_size', '?')} workers"
    return note_text(event)
