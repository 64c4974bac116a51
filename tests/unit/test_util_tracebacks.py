"""Exceptions that leave raysgd: they keep no object of raysgd alive, and IPython shows the user's frames only."""

from __future__ import annotations

import sys
import traceback
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd._util.tracebacks import hide_own_frames, leaves_raysgd, without_own_frames
from raysgd.errors import ConfigError, WorkerTraceback


class Held:
    """Stands for a Trainer."""


def own(function: Any) -> Any:
    """Return the function as if a module of raysgd defined it."""
    namespace: dict[str, Any] = {**function.__globals__, "__name__": "raysgd.trainer.fake"}
    return type(function)(function.__code__, namespace, function.__name__, None, function.__closure__)


def _inner(held: Any, error: Exception) -> None:
    kept = held  # noqa: F841
    try:
        raise KeyError("an error before it")
    except KeyError:
        raise error  # noqa: B904


inner = own(_inner)


def _public(held: Any, error: Exception, *, also: Any = None) -> None:
    inner(held, error)


public = leaves_raysgd(own(_public))


def made(references: list[weakref.ref[Held]]) -> Held:
    held = Held()
    references.append(weakref.ref(held))
    return held


def raised(error: Exception) -> tuple[Exception, list[weakref.ref[Held]]]:
    references: list[weakref.ref[Held]] = []
    with pytest.raises(type(error)) as caught:
        public(made(references), error, also=made(references))
    return caught.value, references


@pytest.mark.parametrize("error", [ValueError("bad"), ConfigError("bad")], ids=lambda error: type(error).__name__)
def test_exception_that_is_kept_does_not_keep_arguments_of_raysgd(error: Exception) -> None:
    kept, references = raised(error)
    assert kept.__context__ is not None and [reference() for reference in references] == [None, None]
    assert "_inner" in "".join(traceback.format_exception(kept)), "the frames themselves stay"


def test_frames_of_raysgd_are_left_out() -> None:
    kept, _ = raised(ValueError("bad"))
    shown = [frame.name for frame in traceback.extract_tb(without_own_frames(kept.__traceback__))]
    assert shown == ["raised"]


class Shell:
    """IPython's shell: it formats the traceback that it is given."""

    def __init__(self) -> None:
        self.InteractiveTB = self

    def structured_traceback(self, kind: Any, error: Any, trace: Any) -> list[str]:
        return [frame.name for frame in traceback.extract_tb(trace)]


@pytest.mark.parametrize(
    ("error", "cause", "is_hidden"),
    [
        (ConfigError("bad"), None, True),
        (ValueError("of train_func"), WorkerTraceback("text", 0, "node"), True),
        (ValueError("a bug"), None, False),
    ],
)
def test_ipython_shows_the_frames_of_the_user(
    monkeypatch: pytest.MonkeyPatch, error: Exception, cause: Exception | None, is_hidden: bool
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=Shell))
    error.__cause__ = cause
    kept: Any = raised(error)[0]
    monkeypatch.setattr(sys, "last_value", kept, raising=False)
    assert hasattr(kept, "_render_traceback_") == is_hidden
    assert not is_hidden or kept._render_traceback_() == ["raised"]


def users_callback(error: Exception) -> None:
    raise error


def _calls_back(error: Exception) -> None:
    users_callback(error)


calls_back = own(_calls_back)


@pytest.mark.parametrize(
    ("function", "error", "names"),
    [
        (calls_back, ValueError("of the user"), ["shown", "users_callback"]),
        (inner, ConfigError("of raysgd"), ["shown"]),
        (inner, ValueError("a bug of raysgd"), ["shown", "_inner"]),
    ],
)
def test_worker_shows_frames_of_raysgd_for_its_bugs_only(function: Any, error: Exception, names: list[str]) -> None:
    def shown() -> None:
        function(*([None] if function is inner else []), error)

    with pytest.raises(type(error)) as caught:
        shown()
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ is not None else None  # this test's frame
    hide_own_frames(caught.value)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == names
