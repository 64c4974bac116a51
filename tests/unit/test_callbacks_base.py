"""The ``callbacks=`` argument: what is accepted, and the errors for what is not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from raysgd.callbacks import (
    Callback,
    CsvCallback,
    PrintCallback,
    ProgressCallback,
    Stop,
    TorchProfilerCallback,
)
from raysgd.callbacks.base import check_callbacks
from raysgd.callbacks.progress.callback import default_callbacks
from raysgd.errors import ConfigError


class UnknownProcess(Callback):
    runs_in = "drivr"  # type: ignore[assignment]


class Awaiting(Callback):
    async def on_result(self, result: Any) -> None:  # type: ignore[override]
        pass


SAME = Callback()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([Callback], "give an instance, Callback"),
        (Callback(), "is not a list"),
        ("csv", "is not a list"),
        ([Callback(), print], r"callbacks\[1\]=<built-in function print> is not a callback"),
        ([SAME, Callback(), SAME], r"callbacks\[2\] is the same Callback as callbacks\[0\]"),
        ([UnknownProcess()], "'drivr' is not known; give one of 'driver', 'controller', 'worker'"),
        ([Awaiting()], "on_result is 'async def'"),
    ],
)
def test_value_that_is_not_a_callback_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_callbacks(given)


def test_any_iterable_of_callbacks_is_accepted_in_its_order() -> None:
    callbacks = [Callback(), PrintCallback()]
    assert check_callbacks(iter(callbacks)) == callbacks
    assert check_callbacks(()) == check_callbacks(None) == []


def test_progress_callback_is_added_once() -> None:
    mine = Callback()
    (first, added) = default_callbacks([mine])
    assert first is mine
    assert isinstance(added, ProgressCallback)
    off = ProgressCallback(mode="off")
    assert default_callbacks([off, mine]) == [mine, off]  # last, so that it knows the warnings of the others


def test_stop_keeps_its_reason_when_pickled() -> None:
    assert pickle.loads(pickle.dumps(Stop("enough"))).reason == "enough"
    assert str(Stop("enough")) == "enough"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ProgressCallback(mode="liv"), "did you mean 'live'"),
        (lambda: ProgressCallback(refresh_hz=0), "refresh_hz"),
        (lambda: CsvCallback("../x.csv"), "cannot name a folder"),
        (lambda: CsvCallback(max_columns=0), ">= 1"),
        (lambda: PrintCallback(every=0), ">= 1"),
        (lambda: TorchProfilerCallback(active=0), ">= 1"),
        (lambda: TorchProfilerCallback(wait=-1), ">= 0"),
    ],
)
def test_invalid_settings_are_refused_when_a_callback_is_made(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
