"""Exceptions that leave raysgd for the user's code: what their tracebacks keep alive, and what a notebook shows of them.

An interactive session keeps the last exception, and with it every frame that the exception passed. If frames of raysgd kept
their local variables, a Trainer would stay alive, with its workers, when its name is given to another one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

from raysgd.errors import RaySGDError, WorkerTraceback

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0]


def leaves_raysgd(function: F) -> F:
    """Decorate a function or method that the user calls: `prepare_for_user` is called with the exceptions that leave it."""

    @functools.wraps(function)
    def called_by_user(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            del args, kwargs  # this frame is in the traceback, too
            prepare_for_user(error)
            raise

    return called_by_user  # type: ignore[return-value]


def prepare_for_user(error: BaseException) -> None:
    """Clear the variables of raysgd's frames, except those that still run; let IPython show the other frames only.

    Frames are shown as usual if the error is neither one of raysgd nor one of train_func: it may be a bug of raysgd.
    """
    for each in _chain(error):
        _clear_own_frames(each)
    is_explained = isinstance(error, RaySGDError) or isinstance(error.__cause__, WorkerTraceback)
    if is_explained and _shell() is not None:
        with contextlib.suppress(AttributeError):  # it takes no attributes
            error._render_traceback_ = _render  # type: ignore[attr-defined]


def _render() -> list[str]:
    """Return the lines that IPython shows for the exception that it handles; IPython calls this as the exception's method."""
    error = sys.exc_info()[1] or sys.last_value  # no argument: an exception that refers to itself would stay alive
    assert error is not None
    lines: list[str] = _shell().InteractiveTB.structured_traceback(
        type(error), error, without_own_frames(error.__traceback__)
    )
    return lines


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of raysgd."""
    kept: TracebackType | None = None
    for each in reversed(list(_entries(trace))):
        if not _is_own(each.tb_frame):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def hide_own_frames(error: BaseException) -> None:
    """Remove the frames of raysgd from an exception of train_func and from what led to it.

    They stay where raysgd itself raised what is not one of its errors, which may be a bug, and where there is no other frame.
    """
    for each in _chain(error):
        entries = list(_entries(each.__traceback__))
        is_unexpected = bool(entries) and _is_own(entries[-1].tb_frame) and not isinstance(each, RaySGDError)
        if not is_unexpected and (kept := without_own_frames(each.__traceback__)) is not None:
            _clear_own_frames(each)  # they may hold tensors, or the process group
            each.__traceback__ = kept


def _clear_own_frames(error: BaseException) -> None:
    for trace in _entries(error.__traceback__):
        if _is_own(trace.tb_frame):
            with contextlib.suppress(RuntimeError):  # it still runs
                trace.tb_frame.clear()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes and its contexts, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _shell() -> Any:
    """Return IPython's shell, or None outside IPython."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()
