"""Examples, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.project import ROOT


def run_example(name: str, *arguments: str, folder: Path) -> str:
    """What an example prints, run in a folder that is also its home; it must end well."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "RAY_ADDRESS": "local"},  # not a cluster that is up already
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
