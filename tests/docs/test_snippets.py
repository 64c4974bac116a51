"""Every block of Python in README and doc/ runs, each document from its top to its end in one go.

A block below ``<!-- no-run: reason -->`` is only compiled.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.project import ROOT, name_of
from support.snippets import documents, run_snippets, snippets

#: tests/docs/test_coming_from.py runs these.
ELSEWHERE = ROOT / "doc" / "coming-from"
WITH_PYTHON = [path for path in documents() if snippets(path, "python") and ELSEWHERE not in path.parents]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", WITH_PYTHON, ids=name_of)
def test_snippets_run(path: Path, ray_cluster: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets(snippets(path, "python"))
