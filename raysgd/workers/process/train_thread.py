"""The thread in which train_func runs, and the handling of an exception there. Worker side.

`raysgd.controller.policies.hang` finds the thread by the name of this file in a stack.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import logging
import os
import queue
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

#: Python's own modules in which an exception from outside may leave a lock taken. Loops of a user may wait in the latter for
#: long, so there it is raised after some time all the same.
_IMPORTING = "<frozen importlib"
_LOCKING = frozenset((threading.__file__, queue.__file__, logging.__file__))
#: An import is waited for so long: extension modules that were left half-initialized fail when they are imported again, and one
#: of pandas then loses the import lock.
_MAX_IMPORT_S = 10.0
_UNSAFE_POLL_S = 0.002
_MAX_UNSAFE_S = 1.0
_ALONE_S = 0.5
#: Seconds until an exception that Python has ignored is raised again.
_IGNORED_S = 0.01
#: Held while the switch interval of the process is changed, so that it gets its own value back.
_switching = threading.Lock()


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


class TrainThread(threading.Thread):
    """The thread of one attempt. Other threads call `start` and `interrupt`, the thread itself calls `call`.

    Args:
        main: The thread's target, which calls train_func by `call`.

    Attributes:
        is_inside: train_func runs.
    """

    def __init__(self, main: Callable[[], None]) -> None:
        super().__init__(target=main, name="raysgd-train", daemon=True)
        self._entering = threading.Lock()
        self._is_kept: Callable[[], bool] = lambda: False
        self.is_inside = False
        _follow_ignored()

    def call(self, function: Callable[..., Any], config: Any, enter: Callable[[], None]) -> Any:
        """Call ``enter`` and then train_func; return what train_func returns. An exception of ``enter`` prevents the call."""
        with self._entering:
            enter()
            self.is_inside = True
        try:
            return function(config) if takes_config(function) else function()
        finally:
            with self._entering:
                self.is_inside = False

    def place(self) -> Place:
        """Return where the thread is in train_func; an empty place if train_func does not run."""
        with self._entering:  # so that the thread does not end now: its clock must not be read then
            ident = self.ident
            if not self.is_inside or ident is None or (frame := sys._current_frames().get(ident)) is None:
                return Place()
            return Place(_innermost_line(frame), hash((id(frame), frame.f_lasti)), _cpu_time_s(ident))

    def interrupt(self, is_kept: Callable[[], bool] | None = None) -> None:
        """Raise `AttemptEnded` in train_func, at whatever line it is; do nothing if train_func does not run.

        It is raised again if Python ignores it: in ``__del__``, for example, or in a callback of the garbage collector.

        Args:
            is_kept: Whether train_func is not to be interrupted where it is now. None: as in the call before.

        Waits for the end of an import, and while the thread is where the exception would leave a lock taken: Python checks for
        it between the call that takes a lock and the ``try`` that releases it. A lost import lock would block every later import
        of this process.
        """
        self._is_kept = is_kept or self._is_kept
        began = time.monotonic()
        while not self._raise_if_safe(time.monotonic() - began):
            time.sleep(_UNSAFE_POLL_S)

    def _raise_if_safe(self, waited_s: float) -> bool:
        # The thread's lock: otherwise train_func could return now, and the exception would hit other code.
        with self._entering, _switching:
            interval_s = sys.getswitchinterval()
            sys.setswitchinterval(_ALONE_S)
            try:
                time.sleep(
                    0
                )  # after it no thread asks for the interpreter's lock within _ALONE_S: train_func does not move
                ident = self.ident
                if not self.is_inside or ident is None:
                    return True
                if self._is_kept() or not _is_safe(sys._current_frames().get(ident), waited_s):
                    return False
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(AttemptEnded))
                return True
            finally:
                sys.setswitchinterval(interval_s)


def _is_safe(innermost: FrameType | None, waited_s: float) -> bool:
    """Return whether an exception may be raised in a frame, when that was waited for so long."""
    frame = innermost
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_IMPORTING) and (frame is innermost or waited_s < _MAX_IMPORT_S):
            return False
        if frame is innermost and name in _LOCKING and waited_s < _MAX_UNSAFE_S:
            return False
        frame = frame.f_back
    return True


@functools.cache
def _follow_ignored() -> None:
    """Raise an `AttemptEnded` again that Python has ignored in a training thread; once in a process."""
    original = sys.unraisablehook

    def hook(given: Any) -> None:
        thread = threading.current_thread()
        if given.exc_type is AttemptEnded and isinstance(thread, TrainThread):
            threading.Timer(_IGNORED_S, thread.interrupt).start()  # here it would be ignored too
        else:
            original(given)

    sys.unraisablehook = hook


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
