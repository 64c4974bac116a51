"""A headless Chromium for tests of pages."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raysgd.cli.main import main
from support.poll import until

_PATIENCE_S = 20.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: The browser that this machine has, and a driver for it.
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None) if importlib.util.find_spec("playwright") else None

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium with playwright: sh tools/get_browser.sh"
)


@dataclass
class Tab:
    """A tab of the browser.

    Attributes:
        page: The page, as playwright has it.
        complaints: Errors and warnings of its console, requests to elsewhere, and dialogs that it opened.
    """

    page: Any
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def take_picture(self, file: Path) -> None:
        """Write a picture of the whole page."""
        file.write_bytes(
            self.page.screenshot(full_page=True)
        )  # given the path, playwright would write it in a thread that stays

    def num_drawn_curves(self) -> int:
        """Return how many of the charts have pixels of a curve, other than those of axes and grid."""
        script = """() => [...document.querySelectorAll(".uplot canvas")].filter(canvas => {
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          for (let i = 0; i < data.length; i += 4) {
            const [r, g, b, a] = data.slice(i, i + 4);
            if (a > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 80) return true;
          }
          return false;
        }).length"""
        return int(self.page.evaluate(script))

    def wait_for(self, expression: str) -> None:
        """Wait until an expression of the page is true. playwright's own way to wait is refused by the page's policy."""
        assert until(lambda: self.page.evaluate(expression), _PATIENCE_S), f"{expression}; {self.complaints}"

    def wait_until_drawn(self) -> None:
        """Wait until all charts in view are drawn."""
        self.wait_for("[...document.querySelectorAll('.plot')].every(e => !e.chart.isVisible || !e.chart.isStale)")

    def wait_for_curves(self, number: int) -> None:
        self.wait_for(f"document.querySelectorAll('.uplot canvas').length >= {number}")


def write_page(folder: Path, *runs: Path) -> str:
    """Write the page of runs into a folder, as `raysgd report` does, and return its address."""
    output = folder / "page.html"
    assert main(["report", *map(str, runs), "-o", str(output)]) == 0
    return output.as_uri()


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Start the browser, and end it afterwards."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Any, address: str, *, width: int = 1280, colours: str = "light") -> Iterator[Tab]:
    """Open a tab of its own at an address."""
    context = browser.new_context(viewport={"width": width, "height": 1500}, color_scheme=colours)
    context.set_default_timeout(20_000)
    tab = Tab(context.new_page())
    tab.page.on("console", lambda message: message.type in ("error", "warning") and tab.complaints.append(message.text))
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.page.on("dialog", lambda dialog: (tab.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
    host = address.partition("#")[0].partition("?")[0].rstrip("/")

    def note(request: Any) -> None:
        if not request.url.startswith((host, "data:")):
            tab.complaints.append(f"request to {request.url}")

    tab.page.on("request", note)
    try:
        tab.page.goto(address)
        yield tab
    finally:
        context.close()
