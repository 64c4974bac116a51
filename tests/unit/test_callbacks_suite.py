"""The conformance suite finds what it is there to find: each wrong callback fails the test that is meant for it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import Callback
from raysgd.errors import ConfigError
from raysgd.result import Result, RunInfo
from raysgd.testing.callback_suite import CallbackSuite, bytes_written


class Unlisted(Callback):
    runs_in = "nowhere"  # type: ignore[assignment]


class OpensTooEarly(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class EndsWhatNeverBegan(Callback):
    def on_run_end(self, error: BaseException | None) -> None:
        self.file.close()  # type: ignore[attr-defined]


class KnowsNumbersOnly(Callback):
    def on_result(self, result: Result) -> None:
        for value in result.values():
            float(value)


class WantsRisingIterations(Callback):
    def on_run_start(self, info: RunInfo) -> None:
        self.last = 0

    def on_result(self, result: Result) -> None:
        if result["training_iteration"] <= self.last:
            raise ValueError("not rising")
        self.last = result["training_iteration"]


class ChangesResults(Callback):
    def on_result(self, result: Result) -> None:
        result["loss"] = 0


class Rewrites(Callback):
    """Writes all it has with every result, to one file for all its runs."""

    def on_run_start(self, info: RunInfo) -> None:
        if not hasattr(self, "path"):
            self.path, self.rows = Path(info.run_dir) / "all.json", list[dict[str, Any]]()

    def on_result(self, result: Result) -> None:
        self.rows.append(dict(result))
        self.path.write_text(json.dumps(self.rows))


class LooksAtAllItHasSeen(Callback):
    def on_run_start(self, info: RunInfo) -> None:
        self.seen: list[float] = []

    def on_result(self, result: Result) -> None:
        self.seen.append(result["loss"])
        self.best = min(abs(loss) for loss in self.seen)


class LeavesStreams(Callback):
    def on_run_start(self, info: RunInfo) -> None:
        sys.stdout = sys.__stderr__  # type: ignore[assignment]


class WaitsForever(Callback):
    released = threading.Event()

    def on_run_start(self, info: RunInfo) -> None:
        threading.Thread(target=self.released.wait, args=(60,), name="left").start()


class Fails(Callback):
    def on_result(self, result: Result) -> None:
        raise OSError("disk full")


def suite_of(make: Callable[[], Callback]) -> CallbackSuite:
    class Suite(CallbackSuite):
        num_results = 500

        def make_callback(self) -> Callback:
            return make()

    return Suite()


@pytest.mark.parametrize(
    ("make", "test", "error"),
    [
        (Unlisted, "test_callback_is_accepted", ConfigError),
        (OpensTooEarly, "test_pickles_before_the_start", TypeError),
        (EndsWhatNeverBegan, "test_accepts_an_end_without_a_start", AttributeError),
        (KnowsNumbersOnly, "test_accepts_events_checkpoints_and_unusual_metrics", AssertionError),
        (Fails, "test_accepts_errors_of_the_run", AssertionError),
        (WantsRisingIterations, "test_accepts_repeated_rounds", AssertionError),
        (ChangesResults, "test_does_not_change_results", AssertionError),
        (Rewrites, "test_second_run_does_not_change_files_of_the_first", AssertionError),
        (LooksAtAllItHasSeen, "test_cost_is_linear_in_the_number_of_results", AssertionError),
        (LeavesStreams, "test_restores_standard_streams_and_ends_its_threads", AssertionError),
        (WaitsForever, "test_restores_standard_streams_and_ends_its_threads", AssertionError),
    ],
)
def test_suite_fails_a_wrong_callback(
    make: Callable[[], Callback], test: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back what a wrong callback leaves
    WaitsForever.released.clear()
    method = getattr(suite_of(make), test)
    arguments = {"tmp_path": tmp_path} if "tmp_path" in method.__code__.co_varnames else {}
    try:
        with pytest.raises(error):
            method(**arguments)
    finally:
        WaitsForever.released.set()


def test_suite_fails_a_callback_that_rewrites_everything(tmp_path: Path) -> None:
    # Defect of an earlier system: the JSON logger did this.
    if bytes_written() == 0:
        pytest.skip("this system does not count written bytes")
    with pytest.raises(AssertionError, match="bytes"):
        suite_of(Rewrites).test_cost_is_linear_in_the_number_of_results(tmp_path)
