"""Every example runs.

A script says in a comment what it is run with here, in small: ``# test: --epochs 1``. A script that needs more than a
call, such as a job for a cluster, names the test that runs it: ``# test: tests/docs/test_job.py``. A notebook is
executed from its first cell to its last. Each starts Ray by itself, as on a user's machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.project import ROOT, name_of
from support.snippets import arguments_of

EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def _test_named_by(example: Path) -> Path | None:
    """The test file that the header names, if it names one."""
    arguments = arguments_of(example) or [""]
    return ROOT / arguments[0] if arguments[0].startswith("tests/") else None


def _run(example: Path, arguments: list[str], folder: Path) -> str:
    """What the example prints."""
    command = [sys.executable, str(example), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(autouse=True)
def _no_cluster_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init()` would join a cluster that runs on this machine; here it starts one."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_example_says_how_it_is_tested(example: Path) -> None:
    assert arguments_of(example) is not None, "add a line such as `# test: --epochs 1` below the docstring"
    test = _test_named_by(example)
    assert test is None or example.name in test.read_text(encoding="utf-8")


@pytest.mark.timeout(600)
def test_examples_without_a_test_of_their_own_run(tmp_path: Path) -> None:
    for example in EXAMPLES:
        if _test_named_by(example) is None:
            _run(example, arguments_of(example) or [], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    outputs, updates = _execute(notebook, tmp_path)
    printed = "".join(output.get("text", "") for output in outputs)
    starts_s = [float(seconds) for seconds in re.findall(r"train_func began ([\d.]+) s after the call", printed)]
    assert len(starts_s) >= 2 and min(starts_s[1:]) < starts_s[0] / 2, "workers were started again"
    pictures = {data["image/png"] for data in updates if "image/png" in data}
    assert len(pictures) > 2 * len(starts_s), "the plots did not grow with the results"
    shown = [output.get("data", {}).get("text/html", "") for output in outputs]
    tables = [text for text in shown if "Trainer: 2 x torch worker (1 CPU)" in text]
    assert [table.count(f"{os.uname().nodename} (") for table in tables] == [0, 2], "before the first run, and after"


def _execute(notebook: Path, folder: Path) -> tuple[list[Any], list[Any]]:
    """The outputs of a notebook's cells when all have run, and the data of each update of one."""
    import nbformat
    from nbclient import NotebookClient

    updates = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                updates.append(msg["content"]["data"])
            return super().process_message(msg, cell, cell_index)

    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    Client(content, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return [output for cell in content.cells for output in cell.get("outputs", [])], updates


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebook_is_kept_without_outputs(notebook: Path) -> None:
    import nbformat

    cells = nbformat.read(notebook, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs")], "clear the outputs before keeping it"
