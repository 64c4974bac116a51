"""Measure the page of a long run: how soon it shows a curve, and how long the browser does not answer.

    python benchmarks/report_page.py [--quick] [--repeat N] [--output FOLDER]

The run has 50,000 results of two ranks with ten metrics each. Needs a Chromium (tools/get_browser.sh) and playwright. Writes
page.json and page.md to doc/benchmarks, or to build/benchmarks with --quick. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from bench.machine import ROOT, describe_machine
from bench.systems.base import wait_for_calm

from raysgd._util.json import encode_rows
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import Journal
from raysgd.viewer.catalog import Catalog
from raysgd.viewer.page import write_file
from raysgd.viewer.run_data import RunData
from raysgd.viewer.server import ViewerServer

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
NUM_RESULTS, NUM_RESULTS_QUICK = 50_000, 5_000
NUM_RANKS, NUM_METRICS, BATCH = 2, 10, 500
#: What a person notices as a pause.
LIMIT_MS = 100
MEASURES = {
    "write_s": "`raysgd report` writes the file, s",
    "file_mb": "size of the file, MB",
    "first_curve_ms": "file opened -> first curve, ms",
    "load_pause_ms": "longest pause while the file is opened, ms",
    "zoom_pause_ms": "longest pause while a range is zoomed and reset, ms",
    "ranks_pause_ms": "longest pause while a curve is shown per rank, ms",
    "live_first_curve_ms": "`raysgd ui`: page opened -> first curve, ms",
    "live_point_s": "`raysgd ui`: result written -> shown, s",
    "live_pause_ms": "`raysgd ui`: longest pause while 100 results come every second, ms",
}
# The longest time in which the page could not run a timer; browsers run timers every 4 ms at most.
WATCH = """
window.longestPause = 0; window.firstCurve = null;
let before = performance.now();
setInterval(() => { const now = performance.now(); longestPause = Math.max(longestPause, now - before - 4); before = now; }, 4);
new MutationObserver(() => {
  if (firstCurve === null && document.querySelector(".uplot canvas")) firstCurve = performance.now();
}).observe(document, { childList: true, subtree: true });
"""


class LongRun:
    """A run that is written step by step, as the TrainerActor writes it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._journal = Journal(Storage.from_uri(folder))
        self._seq = self._count = 0
        self._started = time.time()
        self._journal.write_run({"name": folder.name, "config": {"lr": 0.1}, "started": self._started})
        for rank in range(NUM_RANKS):
            self._event("worker_up", rank=rank, node="node", pid=rank + 1)
        start = {"attempt": 1, "world_size": NUM_RANKS, "iterations_before": 0, "time_before_s": 0.0}
        self._frame(frames.ATTEMPT, start)
        self._event("attempt_start", **start)

    def report(self, count: int) -> int:
        """Write this many results of all ranks; return the last iteration."""
        for rank in range(NUM_RANKS):
            rows = [self._row(self._count + place, rank) for place in range(count)]
            data = {"first": self._count, "count": count}
            self._frame(frames.REPORTS, data, rank, encode_rows(rows))
        self._count += count
        self._journal.flush()
        return self._count

    def _row(self, step: int, rank: int) -> tuple[float, float, dict[str, Any]]:
        noise = math.sin(step * 12.9898 + rank) * 0.1
        metrics = {f"metric_{k}": (k + 1) / (1 + step / 1000) + noise for k in range(NUM_METRICS - 1)}
        return self._started + step / 100, step / 100, {"loss": 1 / (1 + step / 500) + noise, **metrics}

    def _event(self, kind: str, **data: Any) -> None:
        self._frame(frames.EVENT, {"kind": kind, "timestamp": time.time(), "data": data})

    def _frame(self, kind: str, data: dict[str, Any], rank: int = -1, rows: bytes = b"") -> None:
        self._journal.append(Frame(self._seq, kind, 1, rank, data, rows))
        self._seq += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once, with a short run: does it all work?")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    load = os.getloadavg()[0]
    num_results, repeat = (NUM_RESULTS_QUICK, 1) if args.quick else (NUM_RESULTS, args.repeat)
    samples: dict[str, list[float]] = {name: [] for name in MEASURES}
    with tempfile.TemporaryDirectory() as folder, _browser() as browser:
        for number in range(repeat):
            if not args.quick:
                wait_for_calm()
            for name, value in measure(Path(folder) / str(number), browser, num_results).items():
                samples[name].append(round(value, 3))
    document = {
        "machine": describe_machine(),
        "measured": date.today().isoformat(),
        "load": round(load, 1),
        "browser": browser.version,
        "results": num_results,
        "samples": samples,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "page.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "page.md").write_text(page, encoding="utf-8")
    print(page)


def measure(folder: Path, browser: Any, num_results: int) -> dict[str, float]:
    """Measure the file and the live page of one run."""
    run = LongRun(folder / "runs" / "run_001")
    while run.report(BATCH) < num_results:
        pass
    found: dict[str, float] = {}
    page = folder / "page.html"
    began = time.perf_counter()
    with open(page, "w", encoding="utf-8") as file:
        file.writelines(write_file([RunData(Storage.from_uri(run.folder))]))
    found["write_s"] = time.perf_counter() - began
    found["file_mb"] = page.stat().st_size / 1e6
    with _tab(browser, page.as_uri()) as tab:
        found["first_curve_ms"] = tab.evaluate("firstCurve")
        tab.wait_for_timeout(500)  # until the other charts are drawn, too
        found["load_pause_ms"] = tab.evaluate("longestPause")
        found["zoom_pause_ms"] = _longest_pause(tab, _zoom)
        found["ranks_pause_ms"] = _longest_pause(tab, lambda tab: tab.click("text=per rank >> nth=0"))
    found |= _measure_live(folder / "runs", run, browser)
    return found


def _measure_live(folder: Path, run: LongRun, browser: Any) -> dict[str, float]:
    server = ViewerServer(Catalog(Storage.from_uri(folder)))
    server.start()
    try:
        with _tab(browser, server.address) as tab:
            first_curve_ms = tab.evaluate("firstCurve")
            times, last = [], "document.querySelector('.plot').chart.last"

            def train(tab: Any) -> None:
                for _ in range(5):
                    began = time.perf_counter()
                    iteration = run.report(100)
                    while tab.evaluate(last) < iteration:
                        tab.wait_for_timeout(10)
                    times.append(time.perf_counter() - began)

            pause_ms = _longest_pause(tab, train)
    finally:
        server.close()
    return {
        "live_first_curve_ms": first_curve_ms,
        "live_point_s": statistics.median(times),
        "live_pause_ms": pause_ms,
    }


def _zoom(tab: Any) -> None:
    box = tab.locator(".u-over").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 50, steps=5)
    tab.mouse.up()
    tab.wait_for_timeout(300)
    tab.click("#reset")


def _longest_pause(tab: Any, act: Any) -> float:
    tab.evaluate("longestPause = 0")
    act(tab)
    tab.wait_for_timeout(500)
    return float(tab.evaluate("longestPause"))


@contextmanager
def _tab(browser: Any, address: str) -> Iterator[Any]:
    """Open a tab and wait for its first curve."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        tab = context.new_page()
        tab.add_init_script(WATCH)
        tab.goto(address)
        deadline = time.monotonic() + 60
        while tab.evaluate("firstCurve") is None:
            if time.monotonic() > deadline:
                raise RuntimeError("the page shows no curve within a minute")
            tab.wait_for_timeout(10)
        yield tab
    finally:
        context.close()


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise SystemExit("there is no Chromium on this machine: sh tools/get_browser.sh")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()


def render(document: dict[str, Any]) -> str:
    """Return the page of the results."""
    rows = []
    for name, title in MEASURES.items():
        values = document["samples"][name]
        shown = f"{statistics.median(values):.3g} | {min(values):.3g} | {max(values):.3g}"
        rows.append(f"| {title} | {shown} |")
    machine, versions = document["machine"], document["machine"]["versions"]
    pauses = [statistics.median(values) for name, values in document["samples"].items() if name.endswith("pause_ms")]
    met = "met" if max(pauses) <= LIMIT_MS else "**missed**"
    lines = [
        "# The page of a long run",
        "",
        "<!-- Written by benchmarks/report_page.py; changes made here are lost. -->",
        "",
        f"The page of a run with {document['results']:,} results, {NUM_RANKS} ranks and {NUM_METRICS} metrics, in a headless "
        f"Chromium {document['browser']}. A pause is a time in which the page does not answer.",
        "",
        "| measure | median | lowest | highest |",
        "| --- | ---: | ---: | ---: |",
        *rows,
        "",
        f"- Target: no pause that a person notices, {LIMIT_MS} ms. The longest takes {max(pauses):.0f} ms: {met}.",
        "",
        f"{len(document['samples']['write_s'])} repetitions, {document['measured']}, on {machine['cores']} cores "
        f"({machine['processor']}), {machine['memory_gib']} GiB; python {versions['python']}. The load average was "
        f"{document['load']} when it began.",
        "",
        "```console",
        "$ python benchmarks/report_page.py",
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
