"""Run examples as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.project import ROOT


def run_example(name: str, *arguments: str, folder: Path) -> str:
    """Run an example in a folder that is also its home; return its output."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "RAY_ADDRESS": "local"},  # not a cluster that is already running
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
