"""The page's view of what the time was used for, in a browser: one run, many ranks, and a run that is live."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd.checkpoint.storage.storage import Storage
from raysgd.goodput.ledger import WORDS
from raysgd.viewer.catalog import Catalog
from raysgd.viewer.server import ViewerServer
from support.browser import Tab, launched, needs_browser, opened, write_page
from support.journals import WrittenRun

pytestmark = needs_browser

AXE = Path(__file__).parent.parent / "support" / "vendored" / "axe.min.js"
SAMPLE_S = 2.0


@pytest.fixture(scope="module")
def browser(_no_process_is_left: None) -> Iterator[Any]:
    with launched() as browser:
        yield browser


class Trained(WrittenRun):
    """A run whose ranks wait for data; one of them longer, for which the others wait."""

    def __init__(self, path: Path, num_ranks: int = 3, slow: int = 1) -> None:
        super().__init__(path)
        self.num_ranks, self.slow = num_ranks, slow
        self.now += 3

    def train(self, num_samples: int, kept: int = 0) -> None:
        self.begin_attempt(range(100, 100 + self.num_ranks), iterations_before=kept)
        self.now += 0.5  # when they have entered
        uses = [{"setup": 0.0, "training": 0.0, "data": 0.0, "waiting": 0.0} for _ in range(self.num_ranks)]
        for number in range(1, num_samples + 1):
            self.now += SAMPLE_S
            for rank, used in enumerate(uses):
                waited_s = 1.2 if rank == self.slow else 0.1
                for use, seconds in (("data", waited_s), ("waiting", 1.2 - waited_s), ("training", SAMPLE_S - 1.2)):
                    used[use] += seconds
                self.event("sample", rank=rank, node="node-1", steps=10 * number, uses=dict(used))

    def die(self) -> None:
        self.event("failure", ranks=[1], nodes=["node-1"], error="rank 1 died", action="retry 1")
        self.now += 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Trained(tmp_path_factory.mktemp("runs") / "failed")
    run.train(5)
    run.die()
    run.train(10, kept=4)
    run.end()
    return run.path


def rows(tab: Tab) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in tab.page.locator("#time tbody tr").all()]


def check_with_axe(tab: Tab) -> None:
    tab.page.evaluate(AXE.read_text(encoding="utf-8"))
    found = tab.page.evaluate("axe.run()")["violations"]
    assert not found, json.dumps([(rule["id"], rule["nodes"][0]["html"]) for rule in found], indent=1)


@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (400, "dark")])
def test_file_has_uses_causes_and_bars_and_axe_finds_nothing(
    browser: Any, run: Path, tmp_path: Path, width: int, colours: str
) -> None:
    with opened(browser, f"{write_page(tmp_path, run)}#/time", width=width, colours=colours) as tab:
        tab.wait_for("document.querySelectorAll('svg.stack').length === 3")
        assert tab.text("#time .goodput").startswith("goodput ") and "with 3 workers" in tab.text("#time")
        shown = [use for use, *_ in rows(tab)]
        assert shown == [words for words in WORDS.values() if words in shown] and "recovering" in shown
        assert sum(float(part.split()[0]) for _, part, _ in rows(tab)) == pytest.approx(100, abs=2)
        causes = tab.page.locator("#time .causes li").all_inner_texts()
        assert any("rank 1 on node-1" in cause and "times as fast" in cause for cause in causes), causes
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        check_with_axe(tab)
        assert tab.complaints == []


def test_moment_is_read_by_pointer_and_keys_and_leads_to_the_timeline(browser: Any, run: Path, tmp_path: Path) -> None:
    with opened(browser, f"{write_page(tmp_path, run)}#/time") as tab:
        tab.wait_for("document.querySelectorAll('svg.stack').length === 3")
        over_time, by_rank = tab.page.locator("#time .chart").all()
        by_rank.focus()
        for key in ("End", "ArrowLeft", "ArrowRight", "ArrowLeft"):
            tab.page.keyboard.press(key)
        assert by_rank.locator(".reading").inner_text().startswith("rank 1, ")
        picture = over_time.locator("svg")
        box = picture.bounding_box()
        picture.hover(position={"x": box["width"] * 0.45, "y": 50})
        assert "recovering 100 %" in over_time.locator(".reading").inner_text()
        over_time.focus()
        tab.page.keyboard.press("Home")
        assert "start 100 %" in over_time.locator(".reading").inner_text()
        picture.click(position={"x": box["width"] * 0.45, "y": 50})
        tab.wait_for("document.querySelector('svg.timeline .moment') !== null && location.hash.startsWith('#/charts')")
        tab.wait_for("document.getElementById('timeline-section').getBoundingClientRect().top < innerHeight")
        begin, end, moment = (
            float(tab.page.locator("svg.timeline .event, svg.timeline .moment").nth(place).get_attribute("x1"))
            for place in (0, 1, -1)
        )
        assert begin < moment and end >= begin, "after the failure"
        assert tab.complaints == []


def test_each_of_many_ranks_has_a_column_that_is_seen(browser: Any, tmp_path: Path) -> None:
    run = Trained(tmp_path / "large", num_ranks=512, slow=300)
    run.train(2)
    run.end()
    for width in (1280, 400):
        with opened(browser, f"{write_page(tmp_path, run.path)}#/time", width=width) as tab:
            tab.wait_for("document.querySelectorAll('svg.stack').length === 3")
            picture = tab.page.locator("#time .chart svg").last
            assert picture.bounding_box()["width"] >= 2 * 512
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            chart = tab.page.locator("#time .chart").last
            chart.focus()
            tab.page.keyboard.press("End")
            assert chart.locator(".reading").inner_text().startswith("rank 511, ")
            tab.wait_for(
                "(() => { const cursor = document.querySelectorAll('#time .cursor')[1].getBoundingClientRect();"
                " return cursor.left > 0 && cursor.right < innerWidth; })()"
            )
            check_with_axe(tab)
        assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_live_run_is_followed_and_several_runs_are_compared(browser: Any, run: Path, tmp_path: Path) -> None:
    live = Trained(tmp_path / "exp" / "run_001")
    live.now = time.time() - 15
    live.train(3)
    live.write()
    server = ViewerServer(Catalog(Storage.from_uri(tmp_path / "exp")))
    server.start()
    try:
        with opened(browser, f"{server.address}#/time") as tab:
            tab.wait_for("document.querySelectorAll('svg.stack').length === 3")
            assert "recovering" not in tab.text("#time")
            live.die()
            live.write()
            tab.wait_for("document.querySelector('#time').innerText.includes('recovering')")
            before = {use: part for use, part, _ in rows(tab)}["recovering"]
            tab.wait_for(
                "![...document.querySelectorAll('#time tbody tr')].some(row => row.innerText.includes"
                f"({json.dumps('recovering')}) && row.innerText.includes({json.dumps(before)}))"
            )
            live.train(2, kept=1)
            live.end()
            tab.wait_for("[...page.runs.values()].some(run => run.time && run.time.is_final)")
            assert tab.complaints == []
    finally:
        server.close()
    with opened(browser, f"{write_page(tmp_path, run, live.path)}#/time") as tab:
        tab.wait_for("document.querySelectorAll('svg.stack').length === 6")
        heads = tab.page.locator("#time h2").all_inner_texts()
        assert len({head.rpartition(": ")[0] for head in heads}) == 2
        assert tab.complaints == []
