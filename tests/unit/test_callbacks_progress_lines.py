"""Progress as plain lines, and the choice between lines and a live table."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path

import pytest

from raysgd.callbacks import ProgressCallback
from raysgd.callbacks.progress.callback import make_display
from raysgd.callbacks.progress.lines import LinesDisplay
from raysgd.callbacks.progress.live import TableDisplay, TerminalScreen
from raysgd.result import Event
from raysgd.testing.callback_suite import drive, make_info, make_result


class Played:
    """A display of lines whose clock stands until it is set."""

    def __init__(self, tmp_path: Path, num_iterations: int | None = None) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        self.info = make_info(tmp_path / "digits")
        self.display = LinesDisplay(self.info, self.file, num_iterations, clock=lambda: self.now)
        self.display.start()

    def result(self, iteration: int) -> None:
        self.display.result(make_result(iteration))

    def lines(self) -> list[str]:
        return [line.removeprefix("[digits] ") for line in self.file.getvalue().splitlines()[1:]]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path)


def test_the_start_says_what_runs_and_where_its_files_are(tmp_path: Path, played: Played) -> None:
    first = played.file.getvalue().splitlines()[0]
    assert first == f"[digits] started with 2 workers, none; files in {tmp_path / 'digits'}"


def test_a_line_is_one_write_so_that_prints_of_the_program_do_not_break_it(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.texts: list[str] = []

        def write(self, text: str) -> int:
            self.texts += [text] if text else []
            return len(text)

    terminal = Terminal()
    LinesDisplay(make_info(tmp_path / "digits"), terminal).start()
    assert [text[-1] for text in terminal.texts] == ["\n"]


def test_slow_results_are_shown_one_by_one(played: Played) -> None:
    for iteration in (1, 2, 3):
        played.result(iteration)
        played.now += 1.5
    assert [line.split(",")[0] for line in played.lines()] == ["iteration 1", "iteration 2", "iteration 3"]


def test_fast_results_are_shown_once_a_second_and_counted(played: Played) -> None:
    for iteration in range(1, 101):
        played.result(iteration)
    assert len(played.lines()) == 1
    played.now = 1.0
    played.result(101)
    assert played.lines()[1] == "iteration 101, 0:01 (training 1:41)  loss=0.009901  (99 results before it not shown)"


def test_the_last_result_is_always_shown(played: Played) -> None:
    for iteration in range(1, 11):
        played.result(iteration)
    played.now = 0.5
    played.display.end(None)
    shown = played.lines()
    assert shown[1] == "iteration 10, 0:00 (training 0:10)  loss=0.1  (8 results before it not shown)"
    assert shown[2] == "finished after 0:00, 10 results"


def test_a_result_that_waits_is_shown_by_the_next_sample(played: Played) -> None:
    played.result(1)
    played.result(2)
    played.now = 1.0
    played.display.event(Event("sample", 0.0, {"rank": 0}))
    assert played.lines() == [
        "iteration 1, 0:00 (training 0:01)  loss=1.0",
        "iteration 2, 0:00 (training 0:02)  loss=0.5",
    ]


def test_failures_and_warnings_are_printed_in_order(played: Played) -> None:
    played.result(1)
    played.result(2)
    failure = {"ranks": [1, 3], "error": "process died", "action": "re-entering from checkpoint 4"}
    played.display.event(Event("failure", 0.0, failure))
    played.display.event(Event("attempt_start", 0.0, {"attempt": 2, "world_size": 4}))
    played.display.event(Event("regroup", 0.0, {"attempt": 2, "why": "rank 1 is preempted"}))
    played.display.event(Event("warning", 0.0, {"message": "disk nearly full"}))
    played.display.event(Event("stop", 0.0, {"why": "enough"}))
    played.display.end(ValueError("two\nlines"))
    assert played.lines()[1:] == [
        "iteration 2, 0:00 (training 0:02)  loss=0.5",
        "rank 1, 3 failed: process died; re-entering from checkpoint 4",
        "attempt 2 with 4 workers",
        "the group forms again: rank 1 is preempted",
        "warning: disk nearly full",
        "stopping: enough",
        "failed after 0:00, 2 results: ValueError: two lines",
    ]


def test_a_run_that_was_stopped_did_not_finish(played: Played) -> None:
    played.result(1)
    played.display.event(Event("run_end", 0.0, {"kind": "stopped", "message": "Ctrl-C"}))
    played.display.end(None)
    assert played.lines()[-1] == "stopped after 0:00, 1 results"


def test_all_times_count_from_the_start_of_the_run(played: Played) -> None:
    played.now = 61.0
    played.result(1)
    played.now = 62.5
    played.result(2)
    played.display.event(Event("run_end", 0.0, {"kind": "done"}))
    played.now = 100.0  # callbacks and writes follow
    played.display.end(None)
    assert played.lines() == [
        "iteration 1, 1:01 (training 0:01)  loss=1.0",
        "iteration 2, 1:02 (training 0:02)  loss=0.5",
        "finished after 1:02, 2 results",
    ]


def test_time_left_is_shown_if_the_number_of_iterations_is_given(tmp_path: Path) -> None:
    played = Played(tmp_path, num_iterations=600)
    played.result(10)
    played.now = 1.0
    played.result(600)
    assert [line.partition("  ")[0] for line in played.lines()] == [
        "iteration 10 of 600, 0:00 (training 0:10, about 9:50 left)",
        "iteration 600 of 600, 0:01 (training 10:00)",
    ]


def test_last_line_counts_the_warnings_and_names_the_last(played: Played) -> None:
    played.info.warnings.append("disk nearly full")
    played.display.end(None)
    played.info.warnings.append("callback X failed in on_run_end: ValueError: no.\nTraceback: ...")
    played.display.end(ValueError("no"))
    assert played.lines() == [
        "finished after 0:00, 0 results; 1 warning: disk nearly full",
        "failed after 0:00, 0 results: ValueError: no; 2 warnings, the last: callback X failed in on_run_end: ValueError: no.",
    ]


def test_warnings_are_not_printed_where_the_log_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    display = LinesDisplay(make_info(tmp_path))
    display.event(Event("warning", 0.0, {"message": "disk nearly full"}))
    assert capsys.readouterr().out == ""


def test_without_a_terminal_progress_is_lines_and_no_escape_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive(ProgressCallback(), tmp_path / "digits", num_results=3)
    out = capsys.readouterr().out
    assert "[digits] iteration 3" in out
    assert "\x1b" not in out


def test_off_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive(ProgressCallback(mode="off"), tmp_path, odd=True)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "file", "term", "expected"),
    [
        ("auto", Terminal(), "xterm", TerminalScreen),
        ("auto", Terminal(), "dumb", LinesDisplay),
        ("auto", Terminal(), "", LinesDisplay),
        ("auto", io.StringIO(), "xterm", LinesDisplay),
        ("live", io.StringIO(), "dumb", TerminalScreen),
        ("lines", Terminal(), "xterm", LinesDisplay),
    ],
)
def test_the_display_fits_what_it_is_shown_on(
    mode: str, file: io.StringIO, term: str, expected: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    display = make_display(mode, 4, file, make_info(tmp_path))
    assert isinstance(display.screen if isinstance(display, TableDisplay) else display, expected)


def test_display_that_attaches_shows_the_newest_of_earlier_results_alone(tmp_path: Path) -> None:
    file, began = io.StringIO(), time.time() - 100.0
    info = dataclasses.replace(make_info(tmp_path / "digits"), started_s=began)
    display = LinesDisplay(info, file, clock=lambda: 0.0)
    display.start()

    def play(iteration: int, elapsed_s: float) -> None:
        display.event(Event("failure", began + elapsed_s, {"error": f"boom {iteration}", "action": "retry"}))
        result = make_result(iteration)
        result["timestamp"] = began + elapsed_s
        display.result(result)

    for iteration in range(1, 5):
        play(iteration, 10.0 * iteration)
    assert len(file.getvalue().splitlines()) == 1
    play(5, 101.0)
    display.end(None)
    lines = [line.removeprefix("[digits] ").partition(" (")[0] for line in file.getvalue().splitlines()[1:4]]
    assert lines == ["iteration 4, 0:40", "boom 5; retry", "iteration 5, 1:40"]


def test_nothing_is_shown_of_a_run_that_a_program_has_left(tmp_path: Path) -> None:
    file = io.StringIO()
    display = ProgressCallback(mode="lines", file=file)
    display.on_run_start(make_info(tmp_path / "digits"))
    display.on_result(make_result(1))
    display.on_result(make_result(2))
    display.leave()
    shown = file.getvalue()
    assert "iteration 1" in shown and "iteration 2" in shown, "what waits is shown"
    display.on_result(make_result(3))
    display.on_event(Event("failure", 0.0, {"error": "boom"}))
    display.on_run_end(None)
    assert file.getvalue() == shown
