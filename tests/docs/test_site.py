"""The documentation builds without a warning, and its pages fetch nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.project import ROOT

FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+src=["']https?:|<link[^>]+rel=["']stylesheet["'][^>]+https?:"""
)


def test_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert tmp_path / "index.html" in pages
    assert not [page for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))]
