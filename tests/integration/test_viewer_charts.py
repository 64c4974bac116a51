"""The charts of the page of runs in a browser: gaps, smoothing, axes, the address, print, what is saved, keys and contrast."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import Tab, launched, needs_browser, opened, write_page
from support.journals import WrittenRun

pytestmark = needs_browser

AXE = Path(__file__).parent.parent / "support" / "vendored" / "axe.min.js"
#: The first colour of the light theme, as a PDF has it: #0072b2.
STROKE_IN_PDF = b"0 .4471 .698 RG"


@pytest.fixture(scope="module")
def browser(_no_process_is_left: None) -> Iterator[Any]:
    with launched() as browser:
        yield browser


def curve(folder: Path, values: list[dict[str, Any]], name: str = "curve") -> Path:
    """Write a run of one rank that reported these metrics."""
    run = WrittenRun(folder / name)
    run.begin_attempt([11])
    run.report(*values)
    run.now += len(values)
    run.end()
    return run.path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of two ranks with ten metrics; the first lost a worker, was paused, and grew."""
    folder = tmp_path_factory.mktemp("pair")
    paths = []
    for number, name in enumerate(("first", "second")):
        run = WrittenRun(folder / name, config={"lr": 0.1 / (number + 1)})
        run.begin_attempt([11, 12])
        for i in range(90):
            for rank in (0, 1):
                metrics = {f"layer/{k}": (k + 1) * math.exp(-i / 30) + rank for k in range(8)}
                run.report(
                    {"loss": math.exp(-i / 20) + (-1) ** i / 10 + number, "epoch": i // 30, **metrics}, rank=rank
                )
                if i % 10 == 0:
                    run.event("sample", rank=rank, node="node-1", run=name, cpu_percent=50, rss_bytes=1e9 + i)
            run.now += 1
        metrics = {"loss": 0.25, "val": {"accuracy": 0.875}}
        run.event("checkpoint", number=1, uri="checkpoint_000001", iteration=88, metrics=metrics, seconds=0.8)
        if not number:
            run.event("failure", ranks=[1], nodes=["node-1"], error="rank 1 died", action="retry 1")
            run.begin_attempt([11, 13], iterations_before=90)
            run.event("straggler", rank=0, why="rank 0 is slow")
            run.event("regroup", attempt=2, why="the run is asked to pause", cause="pause")
            run.event("paused", attempt=2)
            run.now += 1
            run.event("resumed")
            run.begin_attempt([14, 15], iterations_before=90)
            run.event("resize", old=2, new=2)
        run.end()
        paths.append(run.path)
    return paths


def inked_columns(tab: Tab, xs: list[float]) -> list[bool]:
    """Return for each x whether the first chart has pixels of a curve there."""
    script = """xs => {
      const plot = document.querySelector(".plot").chart.plot, canvas = plot.ctx.canvas, { top, height } = plot.bbox;
      return xs.map(x => {
        const { data } = plot.ctx.getImageData(Math.round(plot.valToPos(x, "x", true)), top + 12, 1, height - 12);
        for (let i = 0; i < data.length; i += 4)
          if (data[i + 3] > 100 && Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3)) > 60) return true;
        return false;
      });
    }"""
    return list(tab.page.evaluate(script, xs))


def data_of(tab: Tab, place: int) -> list[float | None]:
    """Return the numbers of a curve of the first chart; 0: those of the horizontal axis."""
    return list(tab.page.evaluate(f"[...document.querySelector('.plot').chart.plot.data[{place}]]"))


def test_line_has_a_gap_where_values_are_not_finite_and_none_where_nothing_was_reported(
    browser: Any, tmp_path: Path
) -> None:
    values = [{"loss": math.nan if 40 <= i < 60 else 1.0} for i in range(100)]
    sparse = [{"loss": 1.0, "other": 1} if i % 20 == 0 else {"other": 1} for i in range(100)]
    for number, (rows, expected) in enumerate([(values, [True, False, True]), (sparse, [True, True, True])]):
        with opened(browser, write_page(tmp_path, curve(tmp_path, rows, f"run_{number}"))) as tab:
            tab.wait_for_curves(1)
            assert inked_columns(tab, [30.5, 50.5, 70.5]) == expected


def test_line_of_a_rank_has_a_gap_where_the_group_had_no_such_rank(browser: Any, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "resized")
    for attempt, pids in enumerate([[11, 12], [11], [11, 13]]):
        run.begin_attempt(pids, iterations_before=30 * attempt)
        for rank in range(len(pids)):
            run.report(*({"loss": 1.0 + rank} for _ in range(30)), rank=rank)
        run.now += 30
    run.end()
    with opened(browser, f"{write_page(tmp_path, run.path)}#/charts?ranks=loss") as tab:
        tab.wait_for("document.querySelector('.legend').innerText.includes('rank 1')")
        rank_1 = data_of(tab, 2)
        script = "document.querySelector('.plot').chart.plot.data[2].findIndex(value => value === null)"
        assert tab.page.evaluate(script) == 30 and rank_1[29] == 2 == rank_1[60]


def test_page_is_printed_with_all_curves_in_dark_on_white(browser: Any, pair: list[Path], tmp_path: Path) -> None:
    with opened(browser, f"{write_page(tmp_path, *pair)}#/charts?all=1", colours="dark") as tab:
        tab.wait_for_curves(1)
        num_charts = tab.page.locator(".chart").count()
        assert tab.page.locator(".uplot").count() < num_charts, "some charts are out of view"
        printed = tab.page.pdf()
        tab.wait_for("document.documentElement.dataset.theme === 'dark'")
        assert tab.complaints == []
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", printed, re.DOTALL)
    drawing = b"".join(zlib.decompress(stream) for stream in streams if stream[:1] == b"x")
    assert drawing.count(STROKE_IN_PDF) >= num_charts == 14


def test_each_event_of_the_timeline_has_a_label_and_an_entry_of_the_key(
    browser: Any, pair: list[Path], tmp_path: Path
) -> None:
    with opened(browser, write_page(tmp_path, pair[0])) as tab:
        names = ["failure", "straggler", "paused", "resumed", "resize"]
        shown = tab.page.locator("svg.timeline text").all()
        labels = [text for text in shown if text.text_content() in {*names, "regroup"}]
        assert [text.text_content() for text in labels] == names
        boxes = [text.bounding_box() for text in labels]
        for place, box in enumerate(boxes):
            assert all(
                not (
                    box["x"] < other["x"] + other["width"]
                    and other["x"] < box["x"] + box["width"]
                    and abs(box["y"] - other["y"]) < 8
                )
                for other in boxes[:place]
            ), "a label hides another one"
        key = tab.text(".key")
        assert all(name in key for name in names)
        ticks = [
            text.text_content() for text in shown if re.fullmatch(r"[\d:.]+ (s|min|ms)", text.text_content() or "")
        ]
        assert ticks[:3] == ["0 s", "10 s", "20 s"]
        tab.page.locator("#timeline summary").last.click()
        assert "loss 0.25, val/accuracy 0.875" in tab.text("#timeline")


def test_smoothing_is_that_of_tensorboard_with_the_raw_line_behind(browser: Any, tmp_path: Path) -> None:
    numbers = [1.0, 5.0, math.nan, 2.0, 8.0, 0.5]
    with opened(browser, write_page(tmp_path, curve(tmp_path, [{"loss": value} for value in numbers]))) as tab:
        tab.wait_for_curves(1)
        tab.page.locator("#smooth").focus()
        tab.page.keyboard.press("End")
        for _ in range(39):
            tab.page.keyboard.press("ArrowLeft")
        tab.wait_for("document.querySelector('.plot').chart.plot.data.length === 3")
        tab.wait_for("location.hash.includes('smooth=0.6')")
        expected: list[float | None] = []
        last = count = 0.0
        for value in numbers:  # as TensorBoard's resmoothDataset computes it
            if math.isnan(value):
                expected.append(None)
                continue
            last, count = last * 0.6 + 0.4 * value, count + 1
            expected.append(last / (1 - 0.6**count))
        assert data_of(tab, 2) == pytest.approx(expected) and data_of(tab, 1)[1] == 5
        assert f"{expected[-1]:.5g}"[:5] in tab.text(".legend") and "(0.5)" in tab.text(".legend")


def test_what_is_shown_is_in_the_address_and_stays_after_a_reload(
    browser: Any, pair: list[Path], tmp_path: Path
) -> None:
    address = write_page(tmp_path, *pair)
    with opened(browser, address) as tab:
        tab.wait_for_curves(2)
        tab.page.get_by_label("Compare").first.uncheck()
        tab.page.select_option("#x", "time")
        tab.page.check("#log")
        tab.page.check("#clip")
        tab.page.fill("#filter", "loss")
        tab.wait_until_drawn()
        tab.page.locator("#charts .chart").focus()
        tab.page.keyboard.press("+")
        tab.page.keyboard.press("+")
        shown = "(({ x, y }) => [x.min, x.max, y.distr])(document.querySelector('.plot').chart.plot.scales)"
        tab.wait_for("location.hash.includes('zoom=')")
        tab.wait_until_drawn()
        before = tab.page.evaluate(shown)
        assert before[2] == 3 and before[0] > 20
        tab.page.reload()
        tab.wait_for_curves(1)
        assert tab.page.evaluate(shown) == before
        assert tab.page.input_value("#filter") == "loss" and tab.page.is_checked("#clip")
        assert [box.is_checked() for box in tab.page.get_by_label("Compare").all()] == [False, True]
        tab.page.goto(f"{address}#/nothing?x=metric%3Anot_there&zoom=a&zoom=b&smooth=much&run=gone&%")
        tab.page.reload()
        tab.wait_for("document.querySelectorAll('#charts .chart').length === 6")
        assert "has no metric not_there" in tab.text("#metrics-note")
        assert tab.complaints == []


def test_any_metric_is_an_axis_and_runs_with_the_same_epochs_keep_all_points(
    browser: Any, pair: list[Path], tmp_path: Path
) -> None:
    with opened(browser, write_page(tmp_path, *pair)) as tab:
        tab.wait_for_curves(2)
        options = tab.page.locator("#x option").all_inner_texts()
        assert options[:5] == ["training iteration", "time since the start", "time in training", "epoch", "layer/0"]
        tab.page.select_option("#x", "metric:epoch")
        tab.wait_for("document.querySelector('.legend').innerText.includes('epoch')")
        tab.wait_until_drawn()
        assert data_of(tab, 0) == sorted([0, 1, 2] * 30)
        tab.page.select_option("#x", "time")
        tab.wait_for("document.querySelector('.legend').innerText.includes('time since')")
        assert tab.complaints == []


ODD = {
    "tiny": [1e-30 * (1 + i) for i in range(50)],
    "huge": [1e300 * (1 + i) for i in range(50)],
    "offset": [1e6 + i / 100 for i in range(50)],
    "large_bytes": [1e9 + i for i in range(50)],
    "zero": [0.0] * 50,
    "signs": [math.sin(i) for i in range(50)],
    "edge": [
        0.99e-3 * 1.2**i for i in range(50)
    ],  # uPlot's own ticks of a logarithmic axis never end for some of these
    "alone": [1.0 if i % 2 else math.nan for i in range(50)],
    "once": [0.5] + [None] * 49,
    "__proto__": [0.5] * 50,
    "x" * 300: [0.25] * 50,
}


@pytest.mark.parametrize("is_log", [False, True])
def test_odd_numbers_and_names_have_curves_and_ticks_that_differ(browser: Any, tmp_path: Path, is_log: bool) -> None:
    rows = [{name: values[i] for name, values in ODD.items()} for i in range(50)]
    address = f"{write_page(tmp_path, curve(tmp_path, rows))}#/charts?all=1{'&log=1' * is_log}"
    with opened(browser, address) as tab:
        tab.wait_for_curves(1)
        script = """() => [...document.querySelectorAll("#charts .chart")].map(({ chart }) => {
          chart.draw();
          return new Promise(done => setTimeout(() => done([chart.options.name, chart.plot && chart.plot.axes[1]._values]), 20));
        })"""
        ticks = dict(tab.page.evaluate(f"Promise.all(({script})())"))
        assert ticks.keys() == ODD.keys()
        drawn = {name: texts for name, texts in ticks.items() if texts is not None}
        assert ticks.keys() - drawn.keys() == ({"zero"} if is_log else set())
        for name, texts in drawn.items():
            assert len(texts) == len(set(texts)) > 1, (name, texts)
        notes = [chart.inner_text() for chart in tab.page.locator("#charts .chart").all()]
        assert [text.partition("\n")[0] for text in notes if "not above 0" in text] == (
            ["zero", "signs"] if is_log else []
        )
        assert tab.num_drawn_curves() >= 4 and tab.complaints == []


def test_thousands_of_metrics_are_shown_in_part(browser: Any, tmp_path: Path) -> None:
    run = curve(tmp_path, [{f"task/{k:04d}": 0.5 for k in range(2000)}] * 2)
    with opened(browser, write_page(tmp_path, run)) as tab:
        tab.wait_for_curves(1)
        tab.page.click("#more")
        assert tab.text("#metrics-count") == "200 of 2000 metrics"
        assert "Filter to see others than the first 200" in tab.text("#metrics-note")
        tab.page.fill("#filter", "1999")
        assert tab.page.locator("#charts h3").all_inner_texts() == ["task/1999"]


def test_chart_is_saved_as_csv_and_png(browser: Any, pair: list[Path], tmp_path: Path) -> None:
    with opened(browser, f"{write_page(tmp_path, *pair)}#/charts?smooth=0.5") as tab:
        tab.wait_for_curves(2)
        saved = {}
        for kind in ("CSV", "PNG"):
            with tab.page.expect_download() as download:
                tab.page.get_by_role("button", name=f"Save loss as {kind}").click()
            assert download.value.suggested_filename == f"loss.{kind.lower()}"
            saved[kind] = Path(download.value.path()).read_bytes()
        header, first, *rows = csv.reader(io.StringIO(saved["CSV"].decode()))
        assert header == ["training iteration", *tab.page.locator("#runs button.name").all_inner_texts()]
        assert first == ["1", "1.1", "2.1"] and len(rows) == 89, "the values that were reported, not the smoothed ones"
        assert saved["PNG"].startswith(b"\x89PNG") and len(saved["PNG"]) > 5000
        assert tab.complaints == []


def test_curves_of_many_runs_have_styles_of_their_own_which_the_legend_shows(browser: Any, tmp_path: Path) -> None:
    paths = [curve(tmp_path, [{"loss": k + i} for i in range(3)], f"run_{k:03d}") for k in range(30)]
    with opened(browser, write_page(tmp_path, *paths)) as tab:
        tab.wait_for_curves(1)
        lines = tab.page.locator("#charts .legend line").all()
        assert len({(line.get_attribute("stroke"), line.get_attribute("stroke-dasharray")) for line in lines}) == 30
        entry = tab.page.locator("#charts .legend button").first
        entry.press("Enter")
        assert entry.get_attribute("aria-pressed") == "false"
        tab.wait_for("!document.querySelector('.plot').chart.plot.series[1].show")


@pytest.mark.parametrize(("width", "colours"), [(1280, "dark"), (400, "light")])
@pytest.mark.parametrize("view", ["charts", "runs", "search"])
def test_axe_finds_nothing(browser: Any, pair: list[Path], tmp_path: Path, view: str, width: int, colours: str) -> None:
    with opened(browser, f"{write_page(tmp_path, *pair)}#/{view}", colours=colours, width=width) as tab:
        tab.wait_for(f"document.querySelector('#view-{view}').checkVisibility()")
        tab.page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
        tab.page.evaluate(AXE.read_text(encoding="utf-8"))
        for has_dialog in (False, True):
            if has_dialog:
                tab.page.keyboard.press("?")
            found = tab.page.evaluate("axe.run()")["violations"]
            assert not found, json.dumps([(rule["id"], rule["nodes"][0]["html"]) for rule in found], indent=1)


def test_keys_do_what_the_dialog_lists_and_can_be_turned_off(browser: Any, pair: list[Path], tmp_path: Path) -> None:
    with opened(browser, write_page(tmp_path, *pair)) as tab:
        tab.wait_for_curves(2)
        keyboard = tab.page.keyboard
        keyboard.press("?")
        assert "choose the horizontal axis" in tab.text("#keys")
        keyboard.press("Escape")
        tab.wait_for("!document.querySelector('#keys').open")
        keyboard.press("l")
        tab.wait_for("document.querySelector('.plot').chart.plot.scales.y.distr === 3")
        keyboard.press("j")
        keyboard.press("j")
        assert tab.page.evaluate("document.activeElement === document.querySelectorAll('.chart')[1]")
        last = tab.page.locator("#charts .legend .value").nth(3).inner_text()
        keyboard.press("Shift+ArrowLeft")
        keyboard.press("Shift+ArrowLeft")
        assert tab.page.locator("#charts .legend .value").nth(3).inner_text() != last
        keyboard.press("t")
        keyboard.press("t")
        tab.wait_for("document.documentElement.dataset.theme === 'dark'")
        keyboard.press("/")
        keyboard.type("layer l")
        tab.wait_for("location.hash.includes('filter=layer+l')")
        tab.page.reload()
        tab.wait_for("document.documentElement.dataset.theme === 'dark'")
        tab.wait_for_curves(1)
        assert tab.page.input_value("#filter") == "layer l" and tab.page.is_checked("#log")
        tab.page.get_by_role("button", name="Keys").click()
        tab.page.uncheck("#keys-on")
        keyboard.press("Escape")
        tab.wait_for("!document.querySelector('#keys').open")
        keyboard.press("l")
        assert tab.page.is_checked("#log")
        assert tab.complaints == []


@pytest.mark.alone
def test_many_long_curves_are_drawn_soon_and_scroll_without_pauses(browser: Any, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "long")
    run.begin_attempt([11])
    for first in range(0, 20_000, 500):
        run.report(*({f"m{k:02d}": math.sin((first + i) / (50 + k)) for k in range(50)} for i in range(500)))
        run.now += 500
    run.end()
    with opened(browser, f"{write_page(tmp_path, run.path)}#/charts?all=1") as tab:
        tab.wait_for_curves(6)
        tab.page.evaluate("""() => {
          window.pauses = [];
          new PerformanceObserver(list => pauses.push(...list.getEntries().map(entry => entry.duration)))
            .observe({ type: "longtask" });
        }""")
        tab.page.mouse.move(600, 700)
        for _ in range(60):
            tab.page.mouse.wheel(0, 150)
            tab.page.wait_for_timeout(30)
        assert tab.page.evaluate("pauses") == [], "tasks of more than 50 ms"
        tab.page.reload()
        tab.wait_for_curves(1)
        script = """() => {
          const began = performance.now();
          for (const chart of page.charts.values()) chart.draw();
          return performance.now() - began;
        }"""
        assert tab.page.evaluate(script) < 2000
