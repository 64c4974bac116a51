"""The process of the callbacks that run on the controller's side: loggers, early stopping.

Callbacks are user objects, which the TrainerActor never unpickles, and they may be slow. So they have a process of their own.
A Trainer has one, started with the first run that needs it. The process outlives the driver and a restart of the TrainerActor.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

import cloudpickle

from raysgd.callbacks.base import Callback
from raysgd.callbacks.runner import CallbackRunner
from raysgd.controller import frames
from raysgd.controller.commands import StopRequested
from raysgd.controller.journal.callback_reader import CallbackReader, warning_in
from raysgd.controller.journal.frame_streams import follow_frames
from raysgd.controller.watchdog import ask, end_with
from raysgd.result import RunInfo
from raysgd.session.events import Failed
from raysgd.workers.liveness.watched import Watched, answers_while_others_block

#: The innermost frames of a callback that `describe_call` shows.
_FRAMES = 6


class CallbackHost(Watched):
    """A Ray actor with one thread for the callbacks, and one that answers `sign_of_life` and `describe_call`.

    Args:
        controller: Handle of the TrainerActor.
    """

    def __init__(self, controller: Any) -> None:
        end_with(controller)
        self._controller = controller
        self._done: tuple[str, Failed | None] | None = None
        self._thread: int | None = None

    @answers_while_others_block
    def describe_call(self) -> tuple[str, str] | None:
        """Return which method of which callback is being called, and the stack inside it; None between two calls."""
        frame = sys._current_frames().get(self._thread) if self._thread is not None else None
        return None if frame is None else find_call(frame)

    def follow(self, run_id: str, info: RunInfo, blob: bytes, reduce: dict[str, str]) -> Failed | None:
        """Run the callbacks of one run; returns after their end, with the error of a critical one.

        A restarted TrainerActor may call it again for the same run, and gets the same answer.
        """
        self._thread = threading.get_ident()
        if self._done is None or self._done[0] != run_id:
            self._done = run_id, self._follow(run_id, info, blob, reduce)
        return self._done[1]

    def _follow(self, run_id: str, info: RunInfo, blob: bytes, reduce: dict[str, str]) -> Failed | None:
        callbacks = cloudpickle.loads(blob)

        def stop(why: str, error: BaseException | None) -> None:
            failed = None if error is None else _failed(error)
            ask(self._controller, "stop", run_id, StopRequested(why, cancel=error is not None, failed=failed))

        def warn(text: str) -> None:
            ask(self._controller, "warn", run_id, text)

        runner = CallbackRunner(callbacks, warn)
        reader = CallbackReader(runner, info, reduce, stop)
        for batch in follow_frames(self._controller, run_id, last=frames.RUN_END, send_again=lambda: True):
            for frame in batch:
                if (warning := warning_in(frame)) is not None:
                    info.warnings.append(warning)
                reader.feed(frame)
        reader.end(None)
        return None if reader.critical is None else _failed(reader.critical)


def find_call(frame: FrameType) -> tuple[str, str] | None:
    """Find a callback's method on the stack that ends with ``frame``; return its name and the stack inside it, or None."""
    frames = list(traceback.walk_stack(frame))  # the innermost first
    calls = [i for i, (each, _) in enumerate(frames) if isinstance(each.f_locals.get("self"), Callback)]
    if not calls:
        return None
    call = frames[calls[-1]][0]
    inside = traceback.StackSummary.extract(reversed(frames[: calls[-1] + 1][:_FRAMES]))
    name = f"{type(call.f_locals['self']).__name__}.{call.f_code.co_name}"
    return name, "".join(traceback.format_list(inside)).rstrip()


def _failed(error: BaseException) -> Failed:
    """Describe the error of a critical callback as a rank's error."""
    try:
        data: bytes | None = cloudpickle.dumps(error)
    except Exception:  # it may contain a lock or a file; its text and type still arrive
        data = None
    return Failed(
        exception=data,
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        summary=traceback.format_exception_only(error)[-1].strip(),
        traceback="".join(traceback.format_exception(error)),
        timestamp=time.time(),
    )
