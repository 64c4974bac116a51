"""The thread in which train_func runs, and what becomes of an exception there. Worker side."""

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
    """The thread of one attempt. Other threads call `start`, `interrupt` and `join`, the thread itself calls `call`.

    Args:
        main: What the thread does; it calls train_func by `call`.
    """

    def __init__(self, main: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=main, name="raysgd-train", daemon=True)
        self._lock = threading.Lock()
        self._is_inside = False

    @property
    def is_inside(self) -> bool:
        """Whether the user's code runs."""
        return self._is_inside

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[..., Any], config: Any, enter: Callable[[], None]) -> Any:
        """Call train_func and return its value.

        Args:
            function: train_func.
            config: Its config.
            enter: Called just before. What it raises keeps train_func from being called.
        """
        with self._lock:
            enter()
            self._is_inside = True
        try:
            return function(config) if takes_config(function) else function()
        finally:
            with self._lock:
                self._is_inside = False

    def interrupt(self) -> None:
        """Raise `AttemptEnded` in train_func, wherever it is."""
        with self._lock:  # outside of train_func the exception would hit other code
            if self._is_inside and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(AttemptEnded)
                )

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def takes_config(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` has a parameter for the config. The driver has checked its signature."""
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
    """Describe an exception whose own text cannot be made; ``error`` is what the attempt to make it raised."""
    error = error.__context__ or error
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    places = "".join(traceback.format_tb(error.__traceback__))
    return Failed(None, name, f"{name}, whose text cannot be shown", places, time.time())
