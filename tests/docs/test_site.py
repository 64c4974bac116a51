"""The documentation builds without a warning, fetches nothing from elsewhere, and works when its pages are opened as files."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd
from support.project import ROOT

FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+src=["']?https?:|<link[^>]+rel=["']?stylesheet["']?[^>]+https?:"""
)
TWO_CLICKS = [
    "coming-from/ray-train",
    "coming-from/lightning",
    "coming-from/accelerate",
    "coming-from/transformers",
    "coming-from/torchrun",
    "guides/recipes",
    "guides/monitoring",
    "reference/trainer",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def article(page: Path) -> str:
    """Return the content of a page, without navigation."""
    text = page.read_text(encoding="utf-8")
    return text[text.index("<article") : text.index("</article>")]


def test_site_builds_strictly_and_fetches_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert site / "index.html" in pages
    assert not [page for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", TWO_CLICKS)
def test_start_page_links_to_a_page_that_people_look_for(site: Path, page: str) -> None:
    assert (site / f"{page}.html").is_file()
    assert f'href="{page}.html' in article(site / "index.html")


def test_reference_of_the_trainer_begins_with_run(site: Path) -> None:
    text = article(site / "reference" / "trainer.html")
    names = re.findall(r'<h[34] id="raysgd\.Trainer\.(\w+)"', text)
    assert names[:2] == ["run", "run_generator"]
    public = {name for name in vars(raysgd.Trainer) if not name.startswith("_")}
    assert set(names) == public


def test_reference_shows_base_classes_of_errors_only(site: Path) -> None:
    """The base classes of the others are internal."""
    assert [page.name for page in (site / "reference").glob("*.html") if "Bases:" in article(page)] == ["errors.html"]


def test_reference_shows_no_markup_of_other_languages(site: Path) -> None:
    assert not [page.name for page in (site / "reference").glob("*.html") if "::</p>" in article(page)]


@pytest.mark.parametrize("name", ["torch", "horovod", "tensorflow", "jax", "env", "none"])
def test_reference_names_every_backend(site: Path, name: str) -> None:
    for page in ("trainer.html", "backends.html"):
        text = html.unescape(re.sub(r"<[^>]+>", "", article(site / "reference" / page)))
        assert f'"{name}"' in text, page


def test_identifiers_in_tables_do_not_break_inside_words(site: Path) -> None:
    """Every page loads the rule after the theme's styles, and tables with code have no class, which the rule asks for."""
    css = (site / "stylesheets" / "extra.css").read_text(encoding="utf-8")
    (rule,) = re.findall(r"\.md-typeset table:not\(\[class\]\) code \{([^}]+)\}", css)
    assert {"overflow-wrap: normal", "word-break: normal"} <= {line.strip() for line in rule.split(";")}
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # its links begin at the host's root
        text = page.read_text(encoding="utf-8")
        sheets = re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', text)
        assert sheets[-1].endswith("stylesheets/extra.css") and len(sheets) > 1, page
        assert (page.parent / sheets[-1]).resolve().is_file(), page
        tables = re.findall(r"<table[^>]*>.*?</table>", text, re.DOTALL)
        assert not [table[:200] for table in tables if "<code" in table and not table.startswith("<table>")], page


def test_search_works_in_pages_that_are_opened_as_files(site: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs a browser: apt install chromium")
    address = f"file://{site}/guides/elastic.html?q=prepare_model"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    command = [browser, *options, "--virtual-time-budget=30000", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    (found,) = re.findall(r'class="md-search-result__meta">\s*([^<]*)<', done.stdout)
    assert re.fullmatch(r"\d+ matching documents\s*", found), found
