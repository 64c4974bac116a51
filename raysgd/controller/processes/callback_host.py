"""The process of the callbacks that run on the controller's side: loggers, early stopping.

Callbacks are user objects, which the TrainerActor never unpickles, and they may be slow. So they have a process of their own.
A Trainer has one, started with the first run that needs it. The process outlives the driver and a restart of the TrainerActor.
"""

from __future__ import annotations

import time
import traceback
from typing import Any

import cloudpickle

from raysgd.callbacks.runner import CallbackRunner
from raysgd.controller import frames
from raysgd.controller.journal.callback_reader import CallbackReader
from raysgd.controller.journal.frame_streams import follow_frames
from raysgd.controller.watchdog import ask, end_with
from raysgd.result import RunInfo
from raysgd.session.events import Failed


class CallbackHost:
    """A Ray actor with one thread.

    Args:
        controller: Handle of the TrainerActor.
    """

    def __init__(self, controller: Any) -> None:
        end_with(controller)
        self._controller = controller
        self._done: tuple[str, Failed | None] | None = None

    def follow(self, run_id: str, info: RunInfo, blob: bytes, reduce: dict[str, str]) -> Failed | None:
        """Run the callbacks of one run; returns after their end, with the error of a critical one.

        A restarted TrainerActor may call it again for the same run, and gets the same answer.
        """
        if self._done is None or self._done[0] != run_id:
            self._done = run_id, self._follow(run_id, info, blob, reduce)
        return self._done[1]

    def _follow(self, run_id: str, info: RunInfo, blob: bytes, reduce: dict[str, str]) -> Failed | None:
        callbacks = cloudpickle.loads(blob)

        def stop(why: str, error: BaseException | None) -> None:
            ask(self._controller, "stop", run_id, why, error is not None, None if error is None else _failed(error))

        def warn(text: str) -> None:
            ask(self._controller, "warn", run_id, text)

        runner = CallbackRunner(callbacks, warn)
        reader = CallbackReader(runner, info, reduce, stop)
        for batch in follow_frames(self._controller, run_id, last=frames.RUN_END, send_again=lambda: True):
            for frame in batch:
                reader.feed(frame)
        reader.end(None)
        return None if reader.critical is None else _failed(reader.critical)


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
