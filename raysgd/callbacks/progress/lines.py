"""Show a run's progress as plain lines, for logs, pipes and CI. Runs in the driver, in the thread that reads the stream."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from raysgd._util.metric_names import find_keys, listed, nearest
from raysgd._util.redact import redact_uri
from raysgd.callbacks.base import Callback
from raysgd.callbacks.progress.state import note_text
from raysgd.callbacks.values import (
    age_s,
    clip,
    duration,
    end_state,
    flatten,
    goodput_text,
    metrics_text,
    one_line,
    split_automatic,
    time_left_s,
)
from raysgd.config.checks import check_count
from raysgd.result import Event, Result, RunInfo

_EVERY_S = 1.0
_MAX_WARNING = 300


def result_line(
    result: Result, elapsed_s: float, metrics: Sequence[str] | None = None, num_iterations: int | None = None
) -> str:
    """Format a result as ``iteration 12 of 60, 0:38 (training 0:34, about 2:16 left)  loss=0.1235  acc=0.9``.

    Args:
        result: The result.
        elapsed_s: Seconds since the run began.
        metrics: Names of the metrics to show; None: all of the user.
        num_iterations: The number of results that the run will have, if that is known.
    """
    own, automatic = split_automatic(result)
    values = flatten(own)
    if metrics is not None:
        every = {**values, **automatic}
        values = {key: every[key] for key in metrics if key in every}
    iteration, trained_s = automatic.get("training_iteration", 0), automatic.get("time_total_s") or 0.0
    head = f"iteration {iteration}" + ("" if num_iterations is None else f" of {num_iterations}")
    left_s = time_left_s(iteration, trained_s, num_iterations)
    left = "" if left_s is None else f", about {duration(left_s)} left"
    head += f", {duration(elapsed_s)} (training {duration(trained_s)}{left})"
    if (attempt := automatic.get("attempt", 1)) != 1:
        head += f", attempt {attempt}"
    return f"{head}  {metrics_text(values)}" if values else head


class PrintCallback(Callback):
    """Prints one line per result.

    Args:
        metrics: Names of the metrics to print; a nested one as ``val/loss``. None: every metric of the user.
        every: Print every n-th iteration only.
        workers: Also print a line for each rank's own metrics.
        num_iterations: The number of results that the run will have; lines then say how much time is left.
    """

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        every: int = 1,
        workers: bool = False,
        num_iterations: int | None = None,
    ) -> None:
        self._metrics = None if metrics is None else tuple(metrics)
        self._every = check_count("PrintCallback(every)", every, minimum=1)
        self._workers = workers
        if num_iterations is not None:
            check_count("PrintCallback(num_iterations)", num_iterations, minimum=1)
        self._num_iterations = num_iterations
        self._name = ""
        self._start_at = 0.0
        self._is_checked = False

    def on_run_start(self, info: RunInfo) -> None:
        self._name = info.name
        self._start_at = time.monotonic() - age_s(info.started_s)
        self._is_checked = False

    def on_result(self, result: Result) -> None:
        self._check_names(result)
        if result.get("training_iteration", 0) % self._every:
            return
        elapsed_s = time.monotonic() - self._start_at
        lines = [f"[{self._name}] {result_line(result, elapsed_s, self._metrics, self._num_iterations)}"]
        if self._workers:
            for rank, metrics in zip(result.ranks, result.workers, strict=False):
                lines.append(f"[{self._name}]   rank {rank}  {metrics_text(metrics)}")
        _print(lines)

    def on_run_end(self, error: BaseException | None) -> None:
        if error is not None:
            _print([f"[{self._name}] failed: {one_line(error)}"])

    def _check_names(self, result: Result) -> None:
        """Warn about names that the first result does not have; they may come later."""
        is_checked, self._is_checked = self._is_checked, True
        missing = [name for name in self._metrics or () if not is_checked and find_keys(result, name) is None]
        if missing:
            names = flatten(split_automatic(result)[0])
            hints = ", ".join(f"{name!r}{nearest(name, names)}" for name in missing)
            self.warn(f"PrintCallback(metrics=...): the first result has no metric {hints}; it has {listed(names)}.")


class LinesDisplay:
    """Prints one line per result, at most one a second; the last result is always printed.

    A result that came too soon is held until a later result or event, or until the end. Each line says how many results
    before it were skipped. The last line says how the run ended, and names its last warning. Warnings are also logged when
    they come, so only a display in a file of its own shows them then.

    A display that attaches to a run receives what was before. It shows the newest of those results alone, and none of those
    events.

    Args:
        info: The run.
        file: Where to write. None: ``sys.stdout`` at the time.
        num_iterations: The number of results that the run will have, if that is known.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        info: RunInfo,
        file: TextIO | None = None,
        num_iterations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._file = file
        self._num_iterations = num_iterations
        self._clock = clock
        self._next_at = clock()
        self._start_at = self._next_at - age_s(info.started_s)
        # What came before was before this display, which attached to the run.
        self._shown_from_s = info.started_s + age_s(info.started_s) - _EVERY_S
        self._newest_s = 0.0  # of what has come so far, in seconds since the epoch
        self._end_at: float | None = None
        self._outcome = "done"
        self._waiting: tuple[Result, float] | None = None
        self._num_skipped = 0
        self._num_results = 0

    def start(self) -> None:
        info = self._info
        workers = "1 worker" if info.num_workers == 1 else f"{info.num_workers} workers"
        self._print(f"started with {workers}, {info.backend}; files in {redact_uri(info.run_dir)}")

    def result(self, result: Result) -> None:
        self._num_results += 1
        self._newest_s = max(self._newest_s, result.get("timestamp", math.inf))
        if self._newest_s < self._shown_from_s:
            self._waiting = result, self._newest_s - self._info.started_s
            return
        if self._waiting is not None:
            self._num_skipped += 1
        self._waiting = result, self._clock() - self._start_at
        if self._clock() >= self._next_at:
            self._show_waiting()

    def event(self, event: Event) -> None:
        if event.kind == "run_end":
            self._end_at, self._outcome = self._clock(), event.data.get("kind", "done")
        self._newest_s = max(self._newest_s, event.timestamp)
        if self._newest_s < self._shown_from_s:
            return
        text = self._event_text(event)
        if text or self._clock() >= self._next_at:
            self._show_waiting()
        if text:
            self._print(text)

    def leave(self) -> None:
        """Print the result that waits; the run continues."""
        self._show_waiting()

    def end(self, error: BaseException | None) -> None:
        self._show_waiting()
        took = duration((self._clock() if self._end_at is None else self._end_at) - self._start_at)
        reason = "" if error is None else f": {one_line(error)}"
        state = end_state(error, self._outcome)
        goodput = f"; {text}" if (text := goodput_text(self._info)) else ""
        self._print(f"{state} after {took}, {self._num_results} results{reason}{goodput}{warnings_text(self._info)}")

    def _show_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        skipped, self._num_skipped = self._num_skipped, 0
        self._next_at = self._clock() + _EVERY_S
        note = f"  ({skipped} results before it not shown)" if skipped else ""
        self._print(f"{result_line(*waiting, num_iterations=self._num_iterations)}{note}")

    def _event_text(self, event: Event) -> str:
        if event.kind == "warning" and self._file is not None:
            return f"warning: {event.data.get('message', '')}"
        if event.kind == "attempt_start" and event.data.get("attempt", 1) != 1:
            return f"attempt {event.data['attempt']} with {event.data.get('world_size', '?')} workers"
        return note_text(event)

    def _print(self, text: str) -> None:
        _print([f"[{self._info.name}] {text}"], self._file)


def _print(lines: list[str], file: TextIO | None = None) -> None:
    """Print in one write, since a line that the program prints meanwhile would come between a text and the end of its line."""
    print("".join(f"{line}\n" for line in lines), end="", file=file or sys.stdout, flush=True)


def warnings_text(info: RunInfo) -> str:
    """Return the end of a display's last line: how many warnings the run had, and the last one; empty without any."""
    if not info.warnings:
        return ""
    last = clip(info.warnings[-1].partition("\n")[0], _MAX_WARNING)
    return f"; 1 warning: {last}" if len(info.warnings) == 1 else f"; {len(info.warnings)} warnings, the last: {last}"
