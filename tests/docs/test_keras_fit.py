"""``examples/backends/keras_fit.py``: how well it learns, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd
from support.project import ROOT

EXAMPLE = ROOT / "examples" / "backends" / "keras_fit.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="TensorFlow or tf_keras is not installed")
def test_digits_are_learned_by_keras(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (accuracy,) = re.findall(r"test accuracy: +(\S+)", done.stdout)
    assert float(accuracy) >= 0.95
    (run_dir,) = re.findall(r"run directory: +(\S+)", done.stdout)
    run = raysgd.load_run(run_dir)
    assert run.metrics["epoch"].tolist() == list(range(12))
    assert run.metrics["loss"].iloc[-1] < 0.2 < run.metrics["loss"].iloc[0]
    (best,) = re.findall(r"best checkpoint: (\S+)", done.stdout)
    assert raysgd.Checkpoint.from_path(best).load().keys() == {"epoch", "weights", "optimizer"}
