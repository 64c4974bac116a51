"""The page of runs in a browser: curves, comparison, zoom, timeline, errors; and the live page while a run trains."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from support import command
from support.browser import Tab, launched, needs_browser, opened, write_page
from support.journals import WrittenRun
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)
pytestmark = needs_browser

MARKUP = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser(_no_process_is_left: None) -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two ranks; the first lost a worker, had numbers that are not finite, and failed."""
    folder = tmp_path_factory.mktemp("runs")
    failed = WrittenRun(folder / "failed", config={"lr": 0.1, "api_key": "hunter2"}, versions={"torch": "2.13"})
    failed.begin_attempt([11, 12])
    for i in range(30):
        for rank in (0, 1):
            loss = {7: math.nan, 20: math.inf}.get(i, 1 / (i + 1) + rank / 10)
            failed.report({"loss": loss, MARKUP: float(i), "note": MARKUP}, rank=rank)
            failed.event(
                "sample", rank=rank, node="node-1", run="failed", cpu_percent=50, rss_bytes=1e9, gpu_percent=None
            )
        failed.now += 1
    failed.event(
        "checkpoint", number=1, uri="checkpoint_000001", iteration=28, metrics={}, seconds=0.8, size_bytes=1000
    )
    failed.event("failure", ranks=[1], nodes=["node-1"], error=f"rank 1 died {MARKUP}", action="retry 1")
    failed.now += 3
    failed.begin_attempt([11, 13], iterations_before=28)
    failed.event("warning", message=f"rank 0 is slow {MARKUP}")
    failed.event("hang", rank=0, why="rank 0 made no progress", stacks={"0": f"line 1 {MARKUP}"})
    error = {"summary": f"ValueError: {MARKUP}", "traceback": f"Traceback\n{MARKUP}", "rank": 1, "node": "node-1"}
    failed.end("error", **error, followed=[[0, "RuntimeError: closed"]], message="it was retried once")
    other = WrittenRun(folder / "other", config={"lr": 0.2}, versions={"torch": "2.13"})
    other.begin_attempt([21, 22])
    for rank in (0, 1):
        other.report(
            *({"loss": 2 / (i + 1), "accuracy": i / 60, "10": i, "constructor": rank} for i in range(60)), rank=rank
        )
    other.now += 60
    other.end()
    return folder


def x_range(tab: Tab) -> tuple[float, float]:
    """Return the range of the first chart's horizontal axis."""
    script = "() => { const x = document.querySelector('.plot').chart.plot.scales.x; return [x.min, x.max]; }"
    first, last = tab.page.evaluate(script)
    return first, last


@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (400, "dark")])
def test_page_shows_a_failed_run_as_text(browser: Any, runs: Path, tmp_path: Path, width: int, colours: str) -> None:
    with opened(browser, write_page(tmp_path, runs / "failed"), width=width, colours=colours) as tab:
        for number, chart in enumerate(tab.page.locator("#charts .chart, #pace .chart").all(), 1):
            chart.scroll_into_view_if_needed()
            tab.wait_for_curves(number)
        assert tab.num_drawn_curves() == number == 6
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.text("h1").endswith("failed") and "failed" in tab.text("#runs tbody tr")
        assert f"ValueError: {MARKUP} on rank 1, node-1" in tab.text("#errors")
        assert MARKUP in tab.text("#errors pre") and "rank 0: RuntimeError: closed" in tab.text("#errors")
        assert f"rank 0 is slow {MARKUP}" in tab.text("#warnings")
        assert "2 values are not finite, first NaN at iteration 8" in tab.text("#charts")
        assert MARKUP in tab.page.locator("#charts h3").all_inner_texts()
        timeline = tab.page.locator("svg.timeline")
        assert timeline.locator(".died").count() == 1 and timeline.locator(".saved").count() == 1
        assert "pid 12" in timeline.inner_html() and "1 checkpoint, half of them in 800 ms" in tab.text("#timeline")
        assert "failure" in tab.text("#events") and "stack of rank 0" in tab.text("#events")
        assert "lr" in tab.text("#config") and "***" in tab.text("#config")
        assert "Memory of workers [bytes]" in tab.text("#pace")
        assert "hunter2" not in tab.page.content()
        tab.take_picture(tmp_path / "page.png")
        assert tab.complaints == []


def test_notebook_shows_curves_and_timeline_of_a_loaded_run(browser: Any, runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "output.html"
    output.write_text(f"<!doctype html><meta charset=utf-8>{raysgd.load_run(runs / 'failed')._repr_html_()}")
    with opened(browser, output.as_uri()) as tab:
        frame = tab.page.frame_locator("iframe")
        frame.locator("#charts .chart").first.scroll_into_view_if_needed()
        frame.locator(".uplot canvas").first.wait_for()
        tab.take_picture(tmp_path / "output.png")
        assert frame.locator("#timeline svg .died").count() == 1
        assert "failed" in tab.text("pre") and "hunter2" not in tab.page.content()
        assert tab.complaints == []


def test_runs_are_compared_and_a_click_shows_one(browser: Any, runs: Path, tmp_path: Path) -> None:
    with opened(browser, write_page(tmp_path, runs / "failed", runs / "other")) as tab:
        tab.wait_for_curves(3)
        legend = tab.page.locator(".chart .legend").first
        assert "failed" in legend.inner_text() and "other" in legend.inner_text()
        assert x_range(tab) == (1, 60)
        differing = tab.page.locator("#config tr.differs").all_inner_texts()
        assert [row.split("\t")[0] for row in differing] == ["lr", "api_key"]
        # Charts that come into view are drawn, and their legends move what is below them.
        tab.page.locator("#only-different").scroll_into_view_if_needed()
        tab.wait_for("[...document.querySelectorAll('.plot')].every(e => !e.chart.isVisible || !e.chart.isStale)")
        tab.page.check("#only-different")
        assert tab.page.locator("#config tbody tr").count() == 2
        tab.page.locator("#runs").get_by_role("button", name="other").click()
        tab.wait_for("document.querySelectorAll('#charts .chart').length === 4")
        assert "accuracy" in tab.text("#charts") and MARKUP not in tab.text("#charts")
        assert not tab.text("#errors").strip()
        tab.page.get_by_label("Compare").first.check()
        tab.wait_for("document.querySelectorAll('#charts .chart').length === 5")
        assert tab.complaints == []


def test_zoom_by_drag_and_by_keyboard_is_reset(browser: Any, runs: Path, tmp_path: Path) -> None:
    with opened(browser, write_page(tmp_path, runs / "other")) as tab:
        tab.wait_for_curves(2)
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.x.max === 60")
        box = tab.page.locator(".u-over").first.bounding_box()
        tab.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
        tab.page.mouse.up()
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.x.max < 40")
        first, last = x_range(tab)
        assert 14 < first < 18 and 29 < last < 32
        both = "[...document.querySelectorAll('.plot')].slice(0, 2).every(plot => plot.chart.plot.scales.x.max < 40)"
        tab.wait_for(both)
        tab.page.click("#reset")
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.x.max === 60")
        assert tab.page.locator("#reset").is_disabled()
        tab.page.locator(".chart").first.focus()
        tab.page.keyboard.press("+")
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.x.max < 50")
        tab.page.keyboard.press("ArrowRight")
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.x.max > 50")
        tab.page.keyboard.press("0")
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.x.max === 60")
        assert tab.complaints == []


def test_ranks_and_other_axes_are_shown_on_demand(browser: Any, runs: Path, tmp_path: Path) -> None:
    with opened(browser, write_page(tmp_path, runs / "other")) as tab:
        tab.wait_for_curves(2)
        assert tab.page.locator("#charts h3").all_inner_texts() == ["loss", "accuracy", "10", "constructor"]
        for button in tab.page.locator("#charts").get_by_role("button", name="per rank").all():
            button.click()
        tab.wait_for("[...document.querySelectorAll('#charts .legend')].every(e => e.innerText.includes('rank 1'))")
        legend = tab.page.locator("#charts .legend").last.inner_text().split()
        assert "".join(legend).endswith("rank00rank11"), "names of the ranks and their last values"
        tab.page.select_option("#x", "training")
        tab.wait_for("document.querySelector('.legend').innerText.includes('time in training')")
        tab.page.check("#log")
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.y.distr === 3")
        assert tab.num_drawn_curves() >= 2
        assert tab.complaints == []


def test_many_metrics_are_filtered_and_odd_runs_are_explained(browser: Any, tmp_path: Path) -> None:
    wide = WrittenRun(tmp_path / "wide")
    wide.begin_attempt([11])
    wide.report(*({f"layer/{k:03d}/norm": k + math.sin(i) for k in range(100)} for i in range(50)))
    wide.now += 50
    wide.end()
    early = WrittenRun(tmp_path / "early")
    early.end("error", error_type="WorkerError", message="workers could not start")
    empty = WrittenRun(tmp_path / "empty").write()
    with opened(browser, write_page(tmp_path, wide.path, early.path, empty.path)) as tab:
        tab.wait_for_curves(4)
        assert tab.text("#metrics-count") == "6 of 100 metrics"
        assert "early ended before its first result" in tab.text("#metrics-note")
        assert "empty has no result yet" in tab.text("#metrics-note")
        assert "workers could not start" in tab.text("#errors")
        tab.page.fill("#filter", "layer /07")
        assert tab.text("#metrics-count") == "10 of 100 metrics"
        tab.page.fill("#filter", "nothing")
        assert "No metric of 100 matches" in tab.text("#metrics-note")
        tab.page.fill("#filter", "")
        tab.page.click("#more")
        assert tab.text("#metrics-count") == "100 of 100 metrics"
        tab.page.locator("#charts .chart").last.scroll_into_view_if_needed()
        tab.wait_for("document.querySelector('#charts .chart:last-child canvas') !== null")
        assert tab.complaints == []


def test_live_page_gets_new_points_while_a_run_trains(browser: Any, ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        while not raysgd.should_stop():
            raysgd.report(loss=1.0)
            time.sleep(0.05)

    with make_trainer(tmp_path / "runs") as trainer:
        stream = trainer.run_generator(train_func, {"lr": 0.5}, callbacks=quiet())
        next(stream)
        process = command.start(None, tmp_path, "ui", str(tmp_path / "runs"), "--json")
        try:
            assert process.stdout is not None
            address = json.loads("".join(process.stdout.readline() for _ in range(4)))["address"]
            with opened(browser, address) as tab:
                tab.wait_for_curves(1)
                assert "live" in tab.text("#runs")
                tab.page.locator("#timeline summary").first.click()
                before = x_range(tab)[1]
                tab.wait_for(f"document.querySelector('.plot').chart.plot.scales.x.max > {before + 10}")
                assert tab.page.locator("#timeline details[open]").count() == 1, (
                    "new points closed what the user had opened"
                )
                stream.cancel()
                tab.wait_for("document.querySelector('#runs').innerText.includes('cancelled')")
                assert "was cancelled" in tab.text("#errors") and "lr" in tab.text("#config")
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=20) == 130
                assert tab.complaints == []
        finally:
            process.kill()
            process.communicate()
