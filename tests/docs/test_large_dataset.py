"""``examples/05_large_dataset.py``: it learns the rule, in one pass over files that it wrote, and holds no more at the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.examples import run_example


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_network_learns_from_files_as_they_are_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    told = run_example("05_large_dataset.py", "--gigabytes", "1.5", "--folder", str(data), folder=tmp_path)
    (rows, accuracy) = re.findall(r"^(\S+) rows in one pass.*accuracy (\S+)$", told, re.MULTILINE)[0]
    assert int(rows.replace(",", "")) == 24 * 65_536
    assert float(accuracy) >= 0.9
    (low, high) = re.findall(r"memory of the largest worker.*: (\S+) to (\S+) MB", told)[0]
    # In three quarters of the pass a worker reads 576 MB: what it is done with must have been let go.
    assert float(high.replace(",", "")) - float(low.replace(",", "")) < 300
