"""What ``callbacks=`` may be, and what is said of what it may not be."""

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
    callbacks_in,
    check_callbacks,
    default_callbacks,
)
from raysgd.errors import ConfigError


class Elsewhere(Callback):
    runs_in = "drivr"  # type: ignore[assignment]


class Awaiting(Callback):
    async def on_result(self, result: Any) -> None:  # type: ignore[override]
        pass


SAME = Callback()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Callback], "give an instance, Callback"),
        (Callback(), "is no list"),
        ("csv", "is no list"),
        (None, "is no list"),
        ([Callback(), print], r"callbacks\[1\]=<built-in function print> is no callback"),
        ([SAME, Callback(), SAME], r"callbacks\[2\] is the same Callback as callbacks\[0\]"),
        ([Elsewhere()], "'drivr' is no process of raysgd; give one of 'driver', 'controller', 'worker'"),
        ([Awaiting()], "on_result is 'async def'"),
    ],
)
def test_what_is_no_callback_is_refused_in_words(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_callbacks(given)


def test_any_iterable_of_callbacks_is_taken_in_its_order() -> None:
    callbacks = [Callback(), PrintCallback()]
    assert check_callbacks(iter(callbacks)) == callbacks
    assert check_callbacks(()) == []


def test_callbacks_are_split_by_process() -> None:
    printer, csv, profiler, mine = PrintCallback(), CsvCallback(), TorchProfilerCallback(), Callback()
    given = [printer, csv, profiler, mine]
    assert callbacks_in(given, "driver") == [printer, mine]
    assert callbacks_in(given, "controller") == [csv]
    assert callbacks_in(given, "worker") == [profiler]


def test_progress_is_there_by_default_and_only_once() -> None:
    mine = Callback()
    (first, added) = default_callbacks([mine])
    assert first is mine
    assert isinstance(added, ProgressCallback)
    off = ProgressCallback(mode="off")
    assert default_callbacks([off, mine]) == [off, mine]


def test_a_stop_keeps_its_reason_when_it_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(Stop("enough"))).reason == "enough"
    assert str(Stop("enough")) == "enough"


@pytest.mark.parametrize(
    ("make", "said"),
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
def test_settings_that_cannot_work_are_refused_when_they_are_made(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
