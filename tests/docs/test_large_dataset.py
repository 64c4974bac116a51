"""``examples/05_large_dataset.py``: it learns the rule, in one pass over files that it wrote, and holds no more at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.project import ROOT

EXAMPLE = ROOT / "examples" / "05_large_dataset.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_network_learns_from_files_as_they_are_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--gigabytes", "0.25", "--folder", str(tmp_path / "data")],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "4 files, 0.2" in done.stdout
    (rows, accuracy) = re.findall(r"^(\S+) rows in one pass.*accuracy (\S+)$", done.stdout, re.MULTILINE)[0]
    assert int(rows.replace(",", "")) == 4 * 65_536
    assert float(accuracy) >= 0.85
    (low, high) = re.findall(r"memory of the largest worker.*: (\S+) to (\S+) MB", done.stdout)[0]
    assert float(high.replace(",", "")) - float(low.replace(",", "")) < 400  # what is read ahead comes and goes
