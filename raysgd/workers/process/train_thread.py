"""The thread in which train_func runs, and the handling of an exception there. Worker side.

`raysgd.controller.policies.hang` finds the thread by the name of this file in a stack.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from raysgd.errors import AttemptEnded
from raysgd.session.events import Failed


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

    def interrupt(self) -> None:
        """Raise `AttemptEnded` in train_func, at whatever line it is; do nothing if train_func does not run."""
        with self._lock:  # otherwise train_func could return now, and the exception would hit other code
            if self.is_inside and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(AttemptEnded)
                )


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
