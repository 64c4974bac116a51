"""The page's views in a browser: table of runs, groups, search with lineage, images, output; and changes that it makes."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli.main import main
from raysgd.session.media import ImageFolder
from raysgd.viewer.catalog import Catalog
from raysgd.viewer.server import ViewerServer
from support.browser import Tab, launched, needs_browser, opened
from support.journals import WrittenRun
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)
pytestmark = needs_browser

AXE = Path(__file__).parent.parent / "support" / "vendored" / "axe.min.js"
MARKUP = "<img src=x onerror=alert(1)>"
CONFIGS: list[dict[str, Any]] = [
    {"optimizer": {"lr": 0.001, "name": "adam"}, "batch": 16, "nesterov": True, "layers": [1, 2]},
    {"optimizer": {"lr": 0.01, "name": "adam"}, "batch": 32, "nesterov": False, "layers": [1, 2]},
    {"optimizer": {"lr": 0.1, "name": "sgd"}, "batch": 64, "nesterov": True, "layers": [3]},
    {"optimizer": {"lr": 1.0, "name": MARKUP}, "batch": None, "nesterov": False},
]
LOSSES = [0.4, 0.2, math.nan, 0.8]


@pytest.fixture(scope="module")
def browser(_no_process_is_left: None) -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (config, loss) in enumerate(zip(CONFIGS, LOSSES, strict=True), 1):
        run = WrittenRun(tmp_path / "runs" / "exp" / f"run_{number:03d}", config=config)
        run.now += 100 * number
        run.begin_attempt([number])
        run.report({"loss": loss + 1, "val": {"acc": number / 10}}, {"loss": loss, "val": {"acc": number / 10}})
        run.end(*(["error"] if number == 4 else []), message=MARKUP if number == 4 else "")
    return tmp_path / "runs"


@contextmanager
def page_of(browser: Any, folder: Path, address: str, **options: Any) -> Iterator[Tab]:
    """Open the live page of a folder at a view."""
    server = ViewerServer(Catalog(Storage.from_uri(folder)))
    server.start()
    try:
        with opened(browser, server.address + address, **options) as tab:
            yield tab
    finally:
        server.close()


def names(tab: Tab, grid: str = "Runs") -> list[str]:
    """Return the numbers of the runs in a table, in its order."""
    found = tab.page.locator(f"table[aria-label='{grid}'] tbody th").all_inner_texts()
    return [name.strip().rpartition("_")[2] for name in found]


def wait_for_rows(tab: Tab, number: int, grid: str = "Runs") -> None:
    tab.wait_for(f"document.querySelectorAll(`table[aria-label='{grid}'] tbody th`).length === {number}")


@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (400, "dark")])
def test_table_of_runs_is_sorted_filtered_and_shown_as_text(
    browser: Any, folder: Path, tmp_path: Path, width: int, colours: str
) -> None:
    with page_of(browser, folder, "#/runs", width=width, colours=colours) as tab:
        wait_for_rows(tab, 4)
        assert names(tab) == ["004", "003", "002", "001"], "newest first"
        head = tab.page.locator("table[aria-label='Runs'] thead th").all_inner_texts()
        assert {"optimizer.lr", "optimizer.name", "batch", "loss, last"} <= {text.strip() for text in head}
        assert MARKUP in tab.text("table[aria-label='Runs']")
        for presses, order in (
            (1, ["002", "001", "004", "003"]),
            (1, ["004", "001", "002", "003"]),
            (1, ["004", "003", "002", "001"]),
        ):
            tab.page.get_by_role("button", name="loss, last").click(click_count=presses)
            assert names(tab) == order, "a value that is not a number is last in both directions"
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.take_picture(tmp_path / "runs.png")
        assert tab.complaints == []


def test_conditions_find_runs_by_config_metric_state_and_text(browser: Any, folder: Path) -> None:
    expected = {
        "lr>0.005": "003 004 002", "lr<=0.01 acc>=0.2": "002", "optimizer.name=ADAM": "001 002", "loss=NaN": "003",
        "loss!=NaN": "001 002 004", "batch=none": "004", "nesterov=true": "001 003", "state=failed": "004",
        "state=done": "001 002 003", "layers~3": "003", "layers!=x": "001 002 003 004", "-adam": "003 004",
        "run_00": "001 002 003 004", "nothing": "", "unknown>1": "", "duration<2": "", "last:val/acc=0.3": "003",
        f'"{MARKUP}"': "004", "lr>": "", "<0": "", "acc<0.25 -lr=0.001": "002",
    }  # fmt: skip
    with page_of(browser, folder, "#/runs") as tab:
        wait_for_rows(tab, 4)
        found = {}
        for query in expected:
            tab.page.fill("#q", query)
            found[query] = " ".join(sorted(names(tab)))
        assert found == {query: " ".join(sorted(numbers.split())) for query, numbers in expected.items()}
        assert tab.complaints == []


def test_columns_and_what_is_found_are_in_the_address(browser: Any, folder: Path) -> None:
    with page_of(browser, folder, "#/runs") as tab:
        wait_for_rows(tab, 4)
        tab.page.click("#columns summary")
        tab.page.fill("#column-filter", "lowest")
        tab.page.get_by_label("loss, lowest").check()
        tab.wait_for("document.querySelector(`table[aria-label='Runs']`).innerText.includes('0.2')")
        tab.page.fill("#q", "adam")
        tab.wait_for("location.hash.includes('q=adam') && location.hash.includes('min%3Aloss')")
        tab.page.reload()
        wait_for_rows(tab, 2)
        assert "loss, lowest" in tab.text("table[aria-label='Runs']") and tab.page.input_value("#q") == "adam"
        assert tab.complaints == []


def test_groups_have_a_mean_and_a_range_in_table_and_charts(browser: Any, folder: Path) -> None:
    with page_of(browser, folder, "#/runs?group=config%3Aoptimizer.name") as tab:
        wait_for_rows(tab, 4)
        row = next(text for text in tab.page.locator("#groups tbody tr").all_inner_texts() if text.startswith("adam"))
        assert " ".join(row.split()).startswith("adam 2 0.3 (0.2 to 0.4)")
        tab.page.fill("#q", "adam")
        tab.page.click("#compare-found")
        tab.page.get_by_role("link", name="Charts").click()
        tab.wait_for("document.querySelector('.plot')?.chart?.plot?.data?.length === 4")
        mean, high, low = tab.page.evaluate("document.querySelector('.plot').chart.plot.data.slice(1)")
        assert np.allclose([mean, high, low], [[1.3, 0.3], [1.4, 0.4], [1.2, 0.2]])
        assert "optimizer.name adam (2 runs)" in tab.text("#charts")
        tab.page.click("#ungroup")
        tab.wait_for("document.querySelector('.plot').chart.plot.data.length === 3")
        assert tab.complaints == []


def test_run_gets_title_and_tags_and_is_deleted_after_a_question(browser: Any, folder: Path) -> None:
    with page_of(browser, folder, "#/runs") as tab:
        wait_for_rows(tab, 4)
        tab.page.get_by_role("button", name="Edit exp/run_002").click()
        tab.page.fill("#edit-title", f"best {MARKUP}")
        tab.page.fill("#edit-tags", f"paper, {MARKUP}")
        tab.page.fill("#edit-notes", "as in the paper")
        tab.page.get_by_role("button", name="Save").click()
        tab.wait_for("document.querySelector(`table[aria-label='Runs']`).innerText.includes('best <img')")
        assert f"paper, {MARKUP}" in tab.text("table[aria-label='Runs']")
        tab.page.fill("#q", "tag:paper")
        assert len(names(tab)) == 1
        tab.page.fill("#q", "")
        tab.page.get_by_role("button", name="Edit exp/run_003").click()
        tab.page.get_by_role("button", name="Delete the run…").click()
        assert "cannot be undone" in tab.text("dialog.editor") and (folder / "exp" / "run_003").exists()
        tab.page.get_by_role("button", name="Delete its folder").click()
        wait_for_rows(tab, 3)
        assert not (folder / "exp" / "run_003").exists()
        assert tab.complaints == []


def test_two_hundred_runs_are_listed_in_a_second_and_scrolled_smoothly(browser: Any, tmp_path: Path) -> None:
    for number in range(200):
        run = WrittenRun(
            tmp_path / "exp" / f"run_{number:03d}", config={"lr": number, **{f"key_{k}": k for k in range(20)}}
        )
        run.begin_attempt([number + 1])
        run.report(*({f"metric_{k}": k * number for k in range(20)} for _ in range(3)))
        run.end()
    with page_of(browser, tmp_path, "#/runs") as tab:
        tab.wait_for("document.querySelector('#runs-count').innerText.startsWith('200 of 200')")
        assert tab.page.locator("table[aria-label='Runs'] tbody th").count() < 150, "only rows in view are drawn"
        tab.page.evaluate("document.querySelector('.grid-scroll').scrollTop = 1e6")
        tab.wait_for("document.querySelector(`table[aria-label='Runs'] tbody`).innerText.includes('run_000')")
        took_ms = tab.page.evaluate(
            "(() => { const began = performance.now(); show('all-runs'); return performance.now() - began; })()"
        )
        assert took_ms < 500, "a busy machine may need ten times as long as a free one"
        assert tab.complaints == []


# -- searches --------------------------------------------------------------------------------------------------------


@pytest.fixture
def search(tmp_path: Path) -> Path:
    """A search: trial b began again from a checkpoint of trial a, and trial c was ended early; a run without reports is last."""
    folder = tmp_path / "storage" / "pbt"
    for name, lr, loss in (("a", 0.001, 0.5), ("b", 0.1, 0.9), ("c", 0.5, 0.7)):
        run = WrittenRun(folder / f"trial_{name}" / "run_001", config={"lr": lr, "act": "relu", "seed": 1})
        run.begin_attempt([1])
        run.report({"loss": loss}, {"loss": loss / 2})
        run.end(*(["cancelled"] if name != "a" else []), message="the search ended this trial" if name != "a" else "")
    copied = WrittenRun(folder / "trial_b" / "run_002", config={"lr": 0.0012, "act": "gelu", "seed": 1})
    copied.now += 50
    copied.begin_attempt([1], iterations_before=2, checkpoint=f"{folder}/trial_a/checkpoint_000001")
    copied.report({"loss": 0.1}, {"loss": 0.05})
    copied.end()
    last = WrittenRun(folder / "trial_b" / "run_003", config={"lr": 0.0012, "act": "gelu", "seed": 1})
    last.begin_attempt([1], iterations_before=4, checkpoint=f"{folder}/trial_b/checkpoint_000002")
    last.end()
    return tmp_path / "storage"


@pytest.mark.parametrize(("width", "colours"), [(1280, "dark"), (400, "light")])
def test_search_shows_trials_axes_and_lineage(
    browser: Any, search: Path, tmp_path: Path, width: int, colours: str
) -> None:
    with page_of(browser, search, "#/search/pbt", width=width, colours=colours) as tab:
        wait_for_rows(tab, 3, "Trials")
        assert sorted(tab.page.locator("table[aria-label='Trials'] tbody th").all_inner_texts()) == [
            "trial_a/run_001",
            "trial_b/run_002",
            "trial_c/run_001",
        ], "of each trial the newest run that has reported"
        assert "ended by the search" in tab.text("table[aria-label='Trials']")
        axes = tab.page.locator("#parallel .axis title").all_text_contents()
        assert axes == ["lr", "act", "loss, last"], "what does not differ has no axis"
        assert tab.page.locator("#parallel path.trial").count() == tab.page.locator("#scatter circle").count() == 3
        assert "trial_b continues trial_a from iteration 2" in tab.page.locator("#lineage").inner_html()
        assert "1 run continued" in tab.text("#lineage") and tab.page.locator("#lineage .lineage-run").count() == 5
        grip = tab.page.locator("#parallel .grip").first
        grip.scroll_into_view_if_needed()
        box = grip.bounding_box()
        tab.page.mouse.move(box["x"] + 14, box["y"] + 2)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + 14, box["y"] + box["height"] * 0.5, steps=4)
        tab.page.mouse.up()
        wait_for_rows(tab, 1, "Trials")
        tab.page.click("#brush-reset")
        wait_for_rows(tab, 3, "Trials")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.take_picture(tmp_path / "search.png")
        tab.page.locator("#scatter circle").first.focus()
        tab.page.keyboard.press("Enter")
        tab.wait_for("location.hash.startsWith('#/charts')")
        assert tab.complaints == []


ODD: dict[str, list[dict[str, Any]]] = {
    "one trial": [{"lr": 0.1}],
    "no config": [{}, {}],
    "a name in some trials only": [{"lr": 0.1}, {"lr": 0.2, "wd": 1}, {"wd": 2}],
    "numbers and texts": [{"lr": 0.1}, {"lr": "auto"}, {"lr": None}],
    "not finite": [{"lr": math.inf}, {"lr": math.nan}, {"lr": 1.0}],
    "zero and powers of ten": [{"lr": 0.0}, {"lr": 1e-12}, {"lr": 1e12}],
    "nested, with dots and slashes": [{"a": {"b/c": {"d.e": 1}}}, {"a": {"b/c": {"d.e": 2}}}],
    "names of JavaScript": [{"constructor": 1, "__proto__": 2, "toString": "x"}, {"constructor": 2, "__proto__": 3}],
    "many values": [{f"k{k}": k * n for k in range(60)} for n in range(3)],
    "markup": [{MARKUP: MARKUP}, {MARKUP: 2}],
}


@pytest.mark.parametrize("configs", ODD.values(), ids=ODD)
def test_odd_configs_and_metrics_do_not_break_the_search(
    browser: Any, tmp_path: Path, configs: list[dict[str, Any]]
) -> None:
    for number, config in enumerate(configs):
        run = WrittenRun(tmp_path / "s" / f"trial_{number}" / "run_001", config=config)
        run.begin_attempt([1])
        if number != 1:  # a trial without a metric
            run.report({"loss": [math.nan, 0.5, -math.inf][number % 3], "constructor": number, "flag": True})
        run.end()
    with page_of(browser, tmp_path, "#/search/s") as tab:
        wait_for_rows(tab, len(configs), "Trials")
        tab.page.get_by_role("link", name="Runs", exact=True).click()
        wait_for_rows(tab, len(configs))
        assert not any(word in tab.text("#views") for word in ("undefined", "[object", "function"))
        places = "[...document.querySelectorAll('path.trial, circle.trial')].map(e => e.getAttribute('d') + e.getAttribute('cx'))"
        assert not any("NaN" in place or "Infinity" in place for place in tab.page.evaluate(places))
        assert tab.complaints == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_in_the_views(browser: Any, search: Path, colours: str) -> None:
    with page_of(browser, search, "#/search/pbt", colours=colours) as tab:
        tab.page.evaluate(AXE.read_text(encoding="utf-8"))
        for view in ("Searches", "Output", "Runs"):
            tab.page.get_by_role("link", name=view, exact=True).click()
            tab.wait_for("document.querySelectorAll('#views > div:not([hidden]) section:not([hidden])').length > 0")
            if view == "Runs":
                tab.page.locator("#columns summary").click()
                tab.page.locator("button[id^=edit-]").first.click()
            found = tab.page.evaluate("axe.run()")["violations"]
            assert not found, [(rule["id"], rule["nodes"][0]["html"]) for rule in found]


# -- images and output -----------------------------------------------------------------------------------------------


@pytest.fixture
def media(tmp_path: Path) -> Path:
    run = WrittenRun(tmp_path / "storage" / "media" / "run_001")
    run.begin_attempt([1])
    images = ImageFolder(Storage.from_uri(run.path / "media"), pytest.fail)
    for step in range(3):
        image = raysgd.Image(np.full((4, 6, 3), 100 * step, np.uint8))
        images.keep(image)
        histogram = raysgd.Histogram(np.arange(10.0) + step, bins=5)
        run.report(
            {"sample": [image.text, image.text], "prompt": f"{step}: {MARKUP}", "weights": histogram.text, "loss": step}
        )
    missing = raysgd.Image(np.ones((2, 2)))
    run.report({"lost": missing.text})
    return run.end().path


def check_media(tab: Tab) -> None:
    tab.wait_for("[...document.querySelectorAll('#media img')].filter(image => image.naturalWidth === 6).length === 2")
    assert f"2: {MARKUP}" in tab.text("#media") and "10 values" in tab.text("#media")
    assert "The image is missing" in tab.text("#media")
    assert tab.page.locator("#media svg.histogram rect").count() == 5
    slider = tab.page.get_by_label("Iteration of prompt")
    slider.focus()
    tab.page.keyboard.press("Home")
    assert f"0: {MARKUP}" in tab.text("#media") and "iteration 1 (1 of 3)" in tab.text("#media")


@pytest.mark.parametrize("is_live", [True, False])
def test_images_texts_and_histograms_are_shown_by_iteration(
    browser: Any, media: Path, tmp_path: Path, is_live: bool
) -> None:
    if is_live:
        with page_of(browser, media.parent.parent, "#/charts") as tab:
            check_media(tab)
            tab.complaints = [text for text in tab.complaints if "404" not in text]  # the image that is missing
            assert tab.complaints == []
        return
    output = tmp_path / "page.html"
    assert main(["report", str(media), "-o", str(output)]) == 0
    with opened(browser, output.as_uri()) as tab:
        check_media(tab)
        tab.page.get_by_role("link", name="Runs").click()
        wait_for_rows(tab, 1)
        assert tab.complaints == []


def test_output_is_live_searched_and_shown_at_a_moment(browser: Any, tmp_path: Path) -> None:
    log = tmp_path / "worker.out"
    run = WrittenRun(tmp_path / "storage" / "exp" / "run_001")
    log.write_text("")
    run.begin_attempt([1])
    run.event("worker_up", rank=0, node=f"{socket.gethostname()} (192.0.2.1)", node_id="n", pid=1, gpus=[])
    run.event("entered", rank=0, attempt=1, timestamp=run.now, output=[[str(log), 0], [str(tmp_path / "none.err"), 0]])
    for second in range(0, 20, 2):
        with log.open("a") as file:
            file.writelines(f"second {second}, line {line} {MARKUP}\n" for line in range(30))
        run.now += 2
        run.event("sample", rank=0, output_bytes=[log.stat().st_size, 0], cpu_percent=1.0, rss_bytes=1.0)
    run.write()
    with page_of(browser, tmp_path / "storage", "#/logs") as tab:
        tab.wait_for("document.querySelector('#output').textContent.includes('second 18, line 29')")
        assert MARKUP in tab.text("#output") and tab.page.locator("#output img").count() == 0
        with log.open("a") as file:
            file.write("a new line\n")
        tab.wait_for("document.querySelector('#output').textContent.includes('a new line')")
        tab.page.fill("#output-find", "SECOND 4,")
        assert tab.page.locator("#output .line").count() == 30 and "30 of 301 lines" in tab.text("#output-count")
        tab.page.fill("#output-find", "")
        tab.page.get_by_role("link", name="Charts").click()
        bar = tab.page.locator("#timeline svg g rect").last
        bar.click()
        tab.wait_for("location.hash.startsWith('#/logs') && document.querySelector('#output .moment') !== null")
        moment = tab.text("#output .moment")
        assert "second 8" in moment or "second 10" in moment or "second 12" in moment, moment
        assert tab.complaints == []


def test_real_run_stores_what_it_shows(browser: Any, ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        for step in range(3):
            print(f"printed in step {step}", flush=True)
            pixels = np.full((5, 7), step / 3)
            raysgd.report(
                loss=1.0, sample=raysgd.Image(pixels), weights=raysgd.Histogram(pixels), prompt=f"step {step}"
            )

    with make_trainer(tmp_path / "runs") as trainer:
        for result in trainer.run_generator(train_func, {"lr": 0.5}, callbacks=quiet()):
            assert result["sample"].startswith("image:media/")
    with page_of(browser, tmp_path / "runs", "#/charts") as tab:
        tab.wait_for("[...document.querySelectorAll('#media img')].some(image => image.naturalWidth === 7)")
        assert "35 values" in tab.text("#media") and "step 2" in tab.text("#media")
        tab.page.get_by_role("link", name="Output").click()
        tab.wait_for("document.querySelector('#output').innerText.includes('printed in step 2')")
        assert tab.complaints == []
