"""Results as printed lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raysgd.callbacks import PrintCallback, values
from raysgd.callbacks.progress import lines
from raysgd.callbacks.runner import CallbackRunner
from raysgd.result import Result
from raysgd.testing.callback_suite import drive, make_info, make_result, running

STARTED_S = 10_000.0


@pytest.fixture(autouse=True)
def still_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no time pass, however busy the machine is."""
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: 50.0))
    monkeypatch.setattr(values, "time", SimpleNamespace(time=lambda: STARTED_S))


def play(callback: PrintCallback, run_dir: Path, *results: Result) -> None:
    with running(callback, run_dir) as runner:
        for result in results:
            runner.call("on_result", result)


def test_a_line_per_result_with_the_users_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(PrintCallback(), tmp_path / "digits", make_result(1, val={"acc": 0.123456}), make_result(2, attempt=2))
    assert capsys.readouterr().out.splitlines() == [
        "[digits] iteration 1, 0:00 (training 0:01)  loss=1.0  val/acc=0.1235",
        "[digits] iteration 2, 0:00 (training 0:02), attempt 2  loss=0.5",
    ]


def test_only_selected_metrics_and_iterations_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = PrintCallback(["world_size", "val/acc"], every=2)
    play(callback, tmp_path / "digits", *(make_result(i, val={"acc": i}) for i in range(1, 5)))
    assert capsys.readouterr().out.splitlines() == [
        "[digits] iteration 2, 0:00 (training 0:02)  world_size=2  val/acc=2",
        "[digits] iteration 4, 0:00 (training 0:04)  world_size=2  val/acc=4",
    ]


def test_names_that_the_first_result_does_not_have_are_warned_about_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    runner = CallbackRunner([PrintCallback(["acc", "world_size"], every=2)], warnings.append)
    for _ in range(2):
        runner.start(make_info(tmp_path))
        for iteration in (1, 2, 3):
            runner.call("on_result", make_result(iteration, val={"acc": 1}))
    message = "PrintCallback(metrics=...): the first result has no metric 'acc' (did you mean 'val/acc'?); it has loss, val/acc."
    assert warnings == [message, message]


def test_time_left_is_printed_if_the_number_of_iterations_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(PrintCallback(num_iterations=61), tmp_path / "digits", make_result(2), make_result(61), make_result(62))
    assert [line.partition(", ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "0:00 (training 0:02, about 0:59 left)  loss=0.5",
        "0:00 (training 1:01)  loss=0.01639",
        "0:00 (training 1:02)  loss=0.01613",
    ]


def test_time_counts_from_the_start_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = PrintCallback()
    callback.on_run_start(replace(make_info(tmp_path / "digits"), started_s=STARTED_S - 3600.5))
    callback.on_result(make_result(1))
    assert capsys.readouterr().out == "[digits] iteration 1, 1:00:00 (training 0:01)  loss=1.0\n"


def test_a_line_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(make_result(1), workers=[{"loss": 1.0}, {"loss": 3.0}], ranks=(0, 2))
    play(PrintCallback(workers=True), tmp_path / "digits", result)
    assert capsys.readouterr().out.splitlines()[1:] == ["[digits]   rank 0  loss=1.0", "[digits]   rank 2  loss=3.0"]


def test_error_is_printed_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive(PrintCallback(), tmp_path / "digits", num_results=0, error=ValueError("two\nlines"))
    assert capsys.readouterr().out == "[digits] failed: ValueError: two lines\n"
