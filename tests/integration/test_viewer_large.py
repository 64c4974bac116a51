"""A long run, and TensorBoard's event files, on the live page in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX import SummaryWriter

from raysgd.checkpoint.storage.storage import Storage
from raysgd.viewer.catalog import Catalog
from raysgd.viewer.server import ViewerServer
from support.browser import launched, needs_browser, opened
from support.journals import WrittenRun

pytestmark = needs_browser

NUM_RESULTS = 120_000


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    run = WrittenRun(tmp_path / "runs" / "long" / "run_001")
    run.begin_attempt([11])
    for first in range(0, NUM_RESULTS, 10_000):
        run.report(*({"loss": 9.0 if first + i == 70_007 else 1.0} for i in range(10_000)))
    run.end()
    with SummaryWriter(str(tmp_path / "boards" / "old")) as writer:
        for step in (0, 100, 200):
            writer.add_scalar("loss", 3.0, step)
    server = ViewerServer(Catalog(Storage.from_uri(tmp_path / "runs"), Storage.from_uri(tmp_path / "boards")))
    server.start()
    try:
        yield server.address
    finally:
        server.close()


@pytest.mark.usefixtures("_no_process_is_left")
def test_long_run_is_summarised_and_event_files_are_shown_next_to_it(address: str) -> None:
    with launched() as browser, opened(browser, f"{address}#/charts?run=long/run_001&run=old") as tab:
        tab.wait_for("document.getElementById('metrics-note').textContent.includes('the lowest and the highest value')")
        found: dict[str, Any] = tab.page.evaluate(
            """() => Object.fromEntries([...page.runs.values()].map(run => [run.name,
              { steps: [...run.x("iteration")], highest: Math.max(...run.column("loss")), step: run.step }]))"""
        )
        long, old = found["long/run_001"], found["old"]
        assert long["highest"] == 9.0, "a summary hides no peak"
        assert (
            len(long["steps"]) <= 100_000 and long["steps"][0] == 1 and long["steps"][-1] >= NUM_RESULTS - long["step"]
        )
        assert (old["steps"], old["highest"]) == ([0, 100, 200], 3.0)
        tab.wait_until_drawn()
        assert tab.num_drawn_curves() >= 1 and tab.complaints == []
