"""Checks of the ``callbacks=`` argument, made in the driver before anything starts, and its split by process."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from raysgd.callbacks.base import Callback, RunsIn
from raysgd.errors import ConfigError

HOOKS = ("on_run_start", "on_result", "on_checkpoint", "on_event", "on_run_end")


def check_callbacks(callbacks: Any) -> list[Callback]:
    """The callbacks as a list.

    Raises:
        ConfigError: Something is no callback, is given twice, or says ``runs_in`` of an unknown process.
    """
    if isinstance(callbacks, (Callback, str)) or not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks={callbacks!r} is no list; give callbacks=[...].")
    checked = list(callbacks)
    for index, callback in enumerate(checked):
        _check_one(f"callbacks[{index}]", callback)
        for other in range(index):
            if checked[other] is callback:
                name = type(callback).__name__
                raise ConfigError(f"callbacks[{index}] is the same {name} as callbacks[{other}]; give it once.")
    return checked


def callbacks_in(callbacks: Sequence[Callback], process: RunsIn) -> list[Callback]:
    """Those of the callbacks whose hooks are called in ``process``, in the order given."""
    return [callback for callback in callbacks if callback.runs_in == process]


def _check_one(where: str, callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise ConfigError(f"{where} is the class {callback.__name__}; give an instance, {callback.__name__}(...).")
    if not isinstance(callback, Callback):
        raise ConfigError(f"{where}={callback!r} is no callback; derive its class from raysgd.Callback.")
    name, allowed = type(callback).__name__, get_args(RunsIn)
    if callback.runs_in not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{name}.runs_in={callback.runs_in!r} is no process of raysgd; give one of {choices}.")
    for hook in HOOKS:
        if inspect.iscoroutinefunction(getattr(callback, hook)):
            raise ConfigError(f"{name}.{hook} is 'async def', which nothing awaits; make it a plain function.")
