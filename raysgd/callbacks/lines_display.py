"""A run's progress as plain lines, for logs, pipes and CI. Runs in the driver, in the thread that reads the stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from raysgd._util.redact import redact_uri
from raysgd.callbacks.formatting import duration, end_state, one_line
from raysgd.callbacks.print_ import result_line
from raysgd.callbacks.progress_state import failure_text, regroup_text, stop_text
from raysgd.result import Event, Result, RunInfo

_EVERY_S = 1.0


class LinesDisplay:
    """One line per result, but no more than one a second; the last result is always shown.

    A result that came too soon waits for the next result or event a second later, or for the end. Each line says how
    many results were passed over before it.

    Args:
        file: Where to; None: ``sys.stdout`` of the moment.
        clock: Monotonic seconds.
    """

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._name = ""
        self._start_at = 0.0
        self._next_at = 0.0
        self._waiting: Result | None = None
        self._num_passed_over = 0
        self._num_results = 0

    def start(self, info: RunInfo) -> None:
        self._name = info.name
        self._start_at = self._next_at = self._clock()
        workers = "1 worker" if info.num_workers == 1 else f"{info.num_workers} workers"
        self._print(f"started with {workers}, {info.backend}; files in {redact_uri(info.run_dir)}")

    def result(self, result: Result) -> None:
        self._num_results += 1
        if self._waiting is not None:
            self._num_passed_over += 1
        self._waiting = result
        if self._clock() >= self._next_at:
            self._show_waiting()

    def event(self, event: Event) -> None:
        text = _event_text(event)
        if self._waiting is not None and (text or self._clock() >= self._next_at):
            self._show_waiting()
        if text:
            self._print(text)

    def end(self, error: BaseException | None) -> None:
        if self._waiting is not None:
            self._show_waiting()
        took = duration(self._clock() - self._start_at)
        reason = "" if error is None else f": {one_line(error)}"
        self._print(f"{end_state(error)} after {took}, {self._num_results} results{reason}")

    def _show_waiting(self) -> None:
        result, self._waiting = self._waiting, None
        if result is None:
            return
        passed_over, self._num_passed_over = self._num_passed_over, 0
        self._next_at = self._clock() + _EVERY_S
        note = f"  ({passed_over} results before it not shown)" if passed_over else ""
        self._print(f"{result_line(result)}{note}")

    def _print(self, text: str) -> None:
        print(f"[{self._name}] {text}", file=self._file or sys.stdout, flush=True)


def _event_text(event: Event) -> str:
    if event.kind == "failure":
        return failure_text(event.data)
    if event.kind == "regroup":
        return regroup_text(event.data)
    if event.kind == "stop":
        return stop_text(event.data)
    if event.kind == "warning":
        return f"warning: {event.data.get('message', '')}"
    if event.kind == "attempt_start" and event.data.get("attempt", 1) != 1:
        return f"attempt {event.data['attempt']} with {event.data.get('world_size', '?')} workers"
    return ""
