"""``examples/03_char_lm.py`` is interrupted half-way, resumes, and reaches its goal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd
from support.project import ROOT

EXAMPLE = ROOT / "examples" / "03_char_lm.py"


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=folder, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        # As in a terminal: a shell script ignores the signal in background processes.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def _read_until_step(process: subprocess.Popen[str], step: int) -> str:
    """What it prints, up to the first result of ``step`` or a later one."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        found = re.search(r"step=(\d+)", line)
        if found and int(found[1]) >= step:
            break
    return printed


@pytest.mark.timeout(600)
def test_interrupted_char_lm_resumes_and_reaches_its_goal(tmp_path: Path) -> None:
    first = _start(tmp_path)
    printed = _read_until_step(first, 200)
    first.send_signal(signal.SIGINT)  # Ctrl-C
    printed += first.communicate()[0]
    assert first.returncode != 0, printed
    (checkpoint,) = re.findall(r"--resume (\S+)", printed)

    second = _start(tmp_path, "--resume", checkpoint, "--goal", "2.0")
    printed = second.communicate()[0]
    assert second.returncode == 0, printed
    assert "def " in printed.partition("generated text:")[2]

    (resumed,) = re.findall(r"--resume (\S+/run_\d+)", printed)
    metrics = raysgd.load_run(resumed).metrics
    saved_at = raysgd.Checkpoint.from_path(checkpoint).iteration
    assert metrics["training_iteration"].tolist() == list(range(saved_at + 1, 21))
    assert metrics["step"].iloc[-1] == 400
