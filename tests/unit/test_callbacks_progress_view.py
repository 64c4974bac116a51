"""The table of the progress display, as it comes out of rich."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raysgd.callbacks.progress.live import mime_bundle
from raysgd.callbacks.progress.state import History, ProgressState
from raysgd.callbacks.progress.view import ProgressView, sparkline
from raysgd.errors import RunCancelledError
from raysgd.result import Event
from raysgd.testing.callback_suite import ODD_METRICS, make_info, make_result


class Run:
    """A run whose clock stands until it is set."""

    def __init__(self, name: str = "digits") -> None:
        self.now = 0.0
        self.state = ProgressState(make_info(Path(name)), clock=lambda: self.now)

    def event(self, kind: str, **data: Any) -> None:
        self.state.event(Event(kind, 0.0, data))

    def sample(self, rank: int, **data: Any) -> None:
        load = {"cpu_percent": 98.4, "rss_bytes": 1.25e9, "reports_per_s": 12.5, "time_per_report_s": 0.08}
        gpu = {"gpu_memory_bytes": None, "gpu_percent": None}
        self.event("sample", rank=rank, node=f"host-{rank}", pid=100 + rank, **{**load, **gpu, **data})

    def text(self, width: int = 110, height: int = 40) -> str:
        console = Console(record=True, file=io.StringIO(), width=width, height=height, force_terminal=True)
        console.print(ProgressView(self.state.snapshot()))
        return console.export_text()

    def row(self, first: str, **size: int) -> list[str]:
        """The cells of the line that begins with this word."""
        lines = [line.strip("│╭╰ ") for line in self.text(**size).splitlines()]
        (row,) = [line.rstrip("│ ").split() for line in lines if line.startswith(first)]
        return row


@pytest.fixture
def run() -> Run:
    return Run()


def test_head_shows_the_state_of_the_run(run: Run) -> None:
    run.event("attempt_start", attempt=1, world_size=2)
    run.state.result(make_result(1234))
    run.now = 3723
    assert " ".join(run.row("running")) == "running 1:02:03 iteration 1,234 2 workers, none"
    assert "raysgd digits" in run.text()


def test_metrics_have_last_value_range_and_history(run: Run) -> None:
    for iteration, loss in enumerate([3.0, 2.0, 1.0, 1.5], start=1):
        run.state.result(make_result(iteration, loss=loss, val={"acc": iteration / 4}))
    assert run.row("loss") == ["loss", "1.5", "1.0", "3.0", "█▅▁▃"]
    assert run.row("val/acc") == ["val/acc", "1.0", "0.25", "1.0", "▁▃▆█"]


def test_rows_stay_when_a_metric_is_not_in_every_result(run: Run) -> None:
    run.state.result(make_result(1, acc=0.5))
    run.state.result(make_result(2))
    assert run.row("acc") == ["acc", "0.5", "0.5", "0.5", "▁"]


def test_unusual_metrics_are_shown(run: Run) -> None:
    for iteration in (1, 2):
        run.state.result(make_result(iteration, **ODD_METRICS))
    text = run.text()
    assert "two lines" in text
    assert run.row("nan")[1] == "nan"
    assert run.row("odd name @ 5%/[x]")[-2:] == ["1.0", "▁▁"]


def test_each_worker_has_its_row(run: Run) -> None:
    run.event("worker_up", rank=0, node="host-0 (10.0.0.1)", pid=77)
    assert run.row("0") == ["0", "host-0", "(10.0.0.1)", "77"]
    run.sample(0)
    run.sample(1)
    assert run.row("rank") == ["rank", "node", "pid", "cpu", "memory", "reports/s", "per", "report"]
    assert run.row("1") == ["1", "host-1", "101", "98%", "1.25", "GB", "12.5", "80", "ms"]


def test_gpu_columns_are_shown_only_with_gpus(run: Run) -> None:
    run.sample(0, gpu_memory_bytes=22e9, gpu_percent=97.0)
    run.sample(1)
    assert run.row("0")[6:9] == ["97%", "22.0", "GB"]
    assert run.row("1")[6:8] == ["-", "-"]


def test_workers_of_a_larger_attempt_are_removed(run: Run) -> None:
    for rank in range(4):
        run.sample(rank)
    run.event("attempt_start", attempt=2, world_size=2)
    assert " ".join(run.row("running")).endswith("2 workers, none attempt 2")
    assert "host-1" in run.text()
    assert "host-2" not in run.text()


def test_stopping_run_shows_the_reason(run: Run) -> None:
    run.event("stop", why="loss has not improved\nfor 3 results")
    run.event("stop", why="another reason")
    assert run.row("stopping")
    assert "! stopping: loss has not improved for 3 results" in run.text()


def test_checkpoints_failures_and_warnings_are_shown(run: Run) -> None:
    run.event("checkpoint", number=12, iteration=120, uri="/runs/digits/checkpoints/12")
    run.now = 6
    run.event("failure", ranks=[1], error="killed", action="re-entering from checkpoint 12")
    run.event("warning", message="disk nearly full\nmore")
    text = run.text()
    assert "checkpoint 12 at iteration 120, 6 s ago  /runs/digits/checkpoints/12" in text
    assert "! rank 1 failed: killed; re-entering from checkpoint 12" in text
    assert "! disk nearly full " in text
    assert run.row("recovering")


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "finished"), (ValueError("loss is nan"), "failed"), (RunCancelledError("by the user"), "cancelled")],
)
def test_end_shows_the_outcome_and_stops_the_clock(error: BaseException | None, state: str, run: Run) -> None:
    run.now = 65
    run.state.end(error)
    run.now = 1000
    assert run.row(state)[1] == "1:05"
    assert error is None or str(error) in run.text()


def _crowd(run: Run) -> None:
    for rank in range(100):
        run.sample(rank, gpu_memory_bytes=22e9, gpu_percent=97.0)
    run.state.result(make_result(1, **{f"metric_{number}": number for number in range(50)}))
    run.event("checkpoint", number=1, iteration=1, uri="/" + "x" * 300)
    for number in range(9):
        run.event("warning", message=f"warning {number} " + "x" * 300)
    run.state.end(ValueError("x" * 1000))


@pytest.mark.parametrize("height", [24, 30, 60])
@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_display_always_fits_the_terminal(width: int, height: int, run: Run) -> None:
    _crowd(run)
    lines = run.text(width=width, height=height).splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert "ValueError" in lines[-2]
    assert any("host-0" in line for line in lines)
    assert any("more" in line for line in lines)


def test_a_notebook_gets_html_and_text(run: Run) -> None:
    run.state.result(make_result(1, text="<b>&"))
    bundle = mime_bundle(ProgressView(run.state.snapshot()))
    assert "&lt;b&gt;&amp;" in bundle["text/html"]
    assert "\x1b" not in bundle["text/plain"]
    assert "iteration 1" in bundle["text/plain"]


def test_a_history_is_bounded_and_keeps_the_whole_run() -> None:
    history = History(max_buckets=64)
    for number in range(100_000):
        history.add(float(number))
    means = history.means()
    assert len(means) <= 65
    assert means == sorted(means)
    assert means[0] < 5_000
    assert means[-1] > 95_000
    assert (history.smallest, history.largest) == (0.0, 99_999.0)
    line = sparkline(history.means(), width=20)
    assert (line[0], line[-1], len(line)) == ("▁", "█", 20)


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [0.0, 1e308], [-1e308, 1e308], list(map(float, range(33)))])
def test_any_history_has_a_sparkline(values: list[float]) -> None:
    history = History()
    for value in values:
        history.add(value)
    assert len(sparkline(history.means(), width=32)) == min(len(values), 32)


def test_results_between_two_drawings_are_bounded(run: Run) -> None:
    for iteration in range(1, 5001):
        run.state.result(make_result(iteration))
    snapshot = run.state.snapshot()
    assert snapshot.iteration == 5000
    assert math.isclose(snapshot.metrics["loss"], 1 / 5000)
    assert len(snapshot.histories["loss"].means()) <= 300


def test_head_shows_the_time_that_is_left(tmp_path: Path) -> None:
    state = ProgressState(make_info(tmp_path), num_iterations=2000, clock=lambda: 0.0)
    state.event(Event("attempt_start", 0.0, {"attempt": 1, "world_size": 2}))
    state.result(make_result(100))
    console = Console(record=True, file=io.StringIO(), width=110, height=40, force_terminal=True)
    console.print(ProgressView(state.snapshot()))
    assert "running   0:00   about 31:40 left   iteration 100 of 2,000   2 workers, none" in console.export_text()


def test_last_line_counts_the_warnings_of_the_run(run: Run) -> None:
    warnings = run.state.snapshot().info.warnings
    for number in range(5):
        warnings.append(f"warning {number}\nTraceback")
        run.event("warning", message=warnings[-1])
    run.event("run_end")
    assert run.row("ending")[0] == "ending"
    warnings.append("callback X failed in on_run_end")  # after the last event
    run.state.end(None)
    text = run.text()
    assert "! callback X failed in on_run_end" in text and "! warning 4" in text and "warning 2" not in text
    last = [line.strip("│╭╰ ") for line in text.splitlines() if line.strip("│╭╰─╯ ")][-1]
    assert last.startswith("6 warnings")
