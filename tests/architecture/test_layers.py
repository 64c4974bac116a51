"""The contracts on imports, which stand in pyproject.toml, hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.project import ROOT


def test_contracts_hold() -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
