"""Turns a run's frames into calls of callbacks. Used by the processes that have callbacks: the driver and the callback host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from raysgd.callbacks.base import Stop
from raysgd.callbacks.runner import CallbackRunner
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.lineage import earlier_results
from raysgd.controller.journal.outcome import outcome_error
from raysgd.controller.rounds import Reduce, RoundMerger
from raysgd.result import Event, RunInfo


class CallbackReader:
    """Calls the callbacks of one process for one run.

    Callbacks end with an error of the run as soon as it is known, and with a success at the frame ``ends_with``.

    Args:
        info: The description of the run; the name, the folder and the start are added when the run begins.
        stop: Called with a reason when a callback ends the run, and with the error of a critical one.
        error_of: Returns the error that an outcome means. In the driver, it is the object that the user gets.
        ends_with: ``frames.RUN_END``, or ``frames.RUN_CLOSED`` to see also what happens after the outcome: the warnings of
            callbacks in other processes.

    Attributes:
        critical: The error of a critical callback, or None.
    """

    def __init__(
        self,
        runner: CallbackRunner,
        info: RunInfo,
        reduce: Reduce,
        stop: Callable[[str, BaseException | None], None],
        *,
        error_of: Callable[[dict[str, Any]], BaseException | None] = outcome_error,
        ends_with: str = frames.RUN_END,
    ) -> None:
        self._runner = runner
        self._info = info
        self._reduce = reduce
        self._merger = RoundMerger(reduce)
        self._stop = stop
        self._error_of = error_of
        self._ends_with = ends_with
        self._checkpoints: set[int] = set()  # numbers; callbacks were called with them
        self._is_started = False
        self._is_ended = False
        self.critical: BaseException | None = None

    def feed(self, frame: Frame) -> None:
        """Process the next frame."""
        wanted: Stop | None = None
        try:
            if frame.kind == frames.EVENT:
                wanted = self._event(Event(**frame.data))
            elif frame.kind == frames.CHECKPOINT:
                wanted = self._checkpoint(frame.data)
            else:
                if frame.kind == frames.RUN_END and (error := self._error_of(frame.data)) is not None:
                    self.end(error)
                if frame.kind == self._ends_with:
                    self.end(None)
                for result in self._merger.feed(frame):
                    first = self._runner.call("on_result", result)
                    wanted = wanted or first
        except Exception as error:  # only a critical callback raises, which ends the run
            if self.critical is None:
                self.critical = error
                self._stop(f"{type(error).__name__} in a callback: {error}", error)
            return
        if wanted is not None:
            self._stop(str(wanted), None)

    def end(self, error: BaseException | None) -> None:
        """End the callbacks, because the run is over, or no more of it can be read."""
        if self._is_started and not self._is_ended:
            self._is_ended = True
            self._runner.end(self.critical or error)

    def _checkpoint(self, data: dict[str, Any]) -> Stop | None:
        if data["number"] in self._checkpoints:  # a restarted controller sends it again
            return None
        self._checkpoints.add(data["number"])
        return self._runner.call("on_checkpoint", Checkpoint(data["uri"], data["metrics"], data["iteration"]))

    def _event(self, event: Event) -> Stop | None:
        if event.kind == "run_start":
            info = describe_started(self._info, event)
            self._info = replace(info, read_earlier=partial(earlier_results, info.run_dir, event.data, self._reduce))
            self._is_started = True
            return self._runner.start(self._info)
        return self._runner.call("on_event", event) if self._is_started else None


def describe_started(info: RunInfo, event: Event) -> RunInfo:
    """Return the description of a run with what its event ``run_start`` says. The list of warnings is the same object."""
    return replace(info, run_dir=event.data["run_dir"], name=event.data["name"], started_s=event.timestamp)


def warning_in(frame: Frame) -> str | None:
    """Return the text of the warning that a frame holds, or None."""
    is_warning = frame.kind == frames.EVENT and frame.data["kind"] == "warning"
    return str(frame.data["data"].get("message", "")) if is_warning else None
