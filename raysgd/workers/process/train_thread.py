"""The thread in which train_func runs, and the handling of an exception there. Worker side.

`raysgd.controller.policies.hang` finds the thread by the name of this file in a stack.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from raysgd.errors import AttemptEnded
from raysgd.session.events import Failed
from raysgd.workers.process.reset import foreign_prefixes


class Place(NamedTuple):
    """The place of the training thread.

    Attributes:
        line: The innermost line of the user's code, such as ``train.py:31 in evaluate``.
        spot: Differs from one instruction of Python to the next; the same while the thread is in one call.
        cpu_s: CPU time of the thread so far.
    """

    line: str = ""
    spot: int = 0
    cpu_s: float = 0.0


class TrainThread:
    """The thread of one attempt. Other threads call `start` and `interrupt`, the thread itself calls `call`.

    Args:
        main: The thread's target, which calls train_func by `call`.

    Attributes:
        is_inside: train_func runs.
    """

    def __init__(self, main: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=main, name="raysgd-train", daemon=True)
        self._lock = threading.Lock()
        self.is_inside = False

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[..., Any], config: Any, enter: Callable[[], None]) -> Any:
        """Call ``enter`` and then train_func; return what train_func returns. An exception of ``enter`` prevents the call."""
        with self._lock:
            enter()
            self.is_inside = True
        try:
            return function(config) if takes_config(function) else function()
        finally:
            with self._lock:
                self.is_inside = False

    def place(self) -> Place:
        """Return where the thread is in train_func; an empty place if train_func does not run."""
        with self._lock:  # so that the thread does not end now: its clock must not be read then
            ident = self._thread.ident
            if not self.is_inside or ident is None or (frame := sys._current_frames().get(ident)) is None:
                return Place()
            return Place(_innermost_line(frame), hash((id(frame), frame.f_lasti)), _cpu_time_s(ident))

    def interrupt(self) -> None:
        """Raise `AttemptEnded` in train_func, at whatever line it is; do nothing if train_func does not run."""
        with self._lock:  # otherwise train_func could return now, and the exception would hit other code
            if self.is_inside and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(AttemptEnded)
                )


def _innermost_line(frame: FrameType | None) -> str:
    """Return the innermost line of train_func that is the user's own code, or the innermost line of all."""
    innermost, foreign = frame, foreign_prefixes()
    while frame is not None and frame.f_code.co_filename != __file__:
        if not frame.f_code.co_filename.startswith(foreign):
            return _describe_line(frame)
        frame = frame.f_back
    return "" if innermost is None else _describe_line(innermost)


def _describe_line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _cpu_time_s(ident: int) -> float:
    """Return the CPU time of a thread that runs, or 0 where the system has no clock for it."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def takes_config(function: Callable[..., Any]) -> bool:
    """Return True if ``function`` has a parameter for the config. The driver has checked its signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return True
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def clear_frames(error: BaseException | None) -> None:
    """Release what the frames of an exception hold: tensors, modules, and the process group with its open sockets."""
    if error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
    gc.collect()


def describe_unprintable(error: BaseException) -> Failed:
    """Describe an exception whose text cannot be made; ``error`` was raised while its text was made."""
    error = error.__context__ or error
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    places = "".join(traceback.format_tb(error.__traceback__))
    return Failed(None, name, f"{name}, whose text cannot be shown", places, time.time())
