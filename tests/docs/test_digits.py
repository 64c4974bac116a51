"""``examples/01_digits.py``, the first thing a user runs: what it shows, how well it learns, what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd
from support.project import ROOT

EXAMPLE = ROOT / "examples" / "01_digits.py"


@pytest.mark.timeout(300)
def test_digits_are_learned(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    table = done.stdout.partition("test accuracy")[0]
    assert "Trainer: 2 x torch worker (1 CPU)" in table
    assert re.search(r"^total +of the cluster +2 of \d+ +0 of 0", table, re.MULTILINE)
    (accuracy,) = re.findall(r"test accuracy of the returned model: (\S+)", done.stdout)
    assert float(accuracy) >= 0.97

    (run_dir,) = re.findall(r"run directory: +(\S+)", done.stdout)
    assert f"tensorboard --logdir {run_dir}/tensorboard" in done.stdout
    assert list(Path(run_dir, "tensorboard").rglob("events.out.tfevents.*"))
    run = raysgd.load_run(run_dir)
    assert run.outcome == "done"
    assert run.metrics["epoch"].tolist() == list(range(12))
    assert run.metrics["loss"].iloc[-1] < 0.2 < run.metrics["loss"].iloc[0]
    kept = {checkpoint.iteration for checkpoint in run.checkpoints}
    assert 12 in kept and 3 <= len(kept) <= 4, "the three best, and the newest"
    (best,) = re.findall(r"best checkpoint: (\S+)", done.stdout)
    assert raysgd.Checkpoint.from_path(best).load()["epoch"] in run.metrics["epoch"].tolist()
