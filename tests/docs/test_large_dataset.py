"""``examples/05_large_dataset.py``: it learns the rule in one epoch of its files, in constant memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.examples import run_example


@pytest.mark.timeout(300)
def test_network_learns_from_files_in_constant_memory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    output = run_example("05_large_dataset.py", "--gigabytes", "1.5", "--folder", str(data), folder=tmp_path)
    (rows, accuracy) = re.findall(r"^(\S+) rows in one epoch.*accuracy (\S+)$", output, re.MULTILINE)[0]
    assert int(rows.replace(",", "")) == 24 * 65_536
    assert float(accuracy) >= 0.9
    (low, high) = re.findall(r"memory of the largest worker.*: (\S+) to (\S+) MB", output)[0]
    # In three quarters of the epoch a worker reads 576 MB: it must have released consumed blocks.
    assert float(high.replace(",", "")) - float(low.replace(",", "")) < 300
