"""``examples/04_chaos.py``: what its ledger says, how well the network learns, and whether the run kept raysgd's promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd
from raysgd.testing import check_history
from support.project import ROOT

EXAMPLE = ROOT / "examples" / "04_chaos.py"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(400)
def test_the_network_learns_while_workers_are_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--kills", "3", "--seconds", "4"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (accuracy,) = re.findall(r"test accuracy of the returned model: (\S+)", done.stdout)
    assert float(accuracy) >= 0.97

    killed = re.findall(r"killed rank \d+ on pid (\d+)", done.stdout)
    assert killed, done.stdout
    for pid in killed:
        after = done.stdout.partition(f"on pid {pid}")[2]
        assert re.search(r"went on with [234] workers", after), f"nothing followed the death of {pid}:\n{done.stdout}"

    *_, last_death = re.finditer(r"death of .*", done.stdout)
    assert "went on with" in done.stdout[last_death.end() :]

    (run_dir,) = re.findall(r"run directory: (\S+)", done.stdout)
    check_history(run_dir, within_s=60)
    run = raysgd.load_run(run_dir)
    assert run.outcome == "done"
    assert run.metrics["epoch"].tolist() == list(range(60))
    failures = run.events[run.events["kind"] == "failure"]
    (told,) = re.findall(rf"{len(killed)} workers killed, (\d+) failures survived", done.stdout)
    assert 1 <= len(failures) == int(told)
