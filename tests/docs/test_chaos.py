"""``examples/04_chaos.py``: what its ledger says, how well the network learns, and whether the run kept raysgd's promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import raysgd
from raysgd.testing import check_history
from support.examples import run_example

EXAMPLE = "04_chaos.py"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(400)
def test_the_network_learns_while_workers_are_killed(tmp_path: Path) -> None:
    told = run_example(EXAMPLE, "--kills", "3", "--seconds", "4", folder=tmp_path)
    (accuracy,) = re.findall(r"test accuracy of the returned model: (\S+)", told)
    assert float(accuracy) >= 0.97

    killed = re.findall(r"killed rank \d+ on pid (\d+)", told)
    assert killed, told
    for pid in killed:
        after = told.partition(f"on pid {pid}")[2]
        assert re.search(r"went on with [234] workers", after), f"nothing followed the death of {pid}:\n{told}"

    *_, last_death = re.finditer(r"death of .*", told)
    assert "went on with" in told[last_death.end() :]

    (run_dir,) = re.findall(r"run directory: (\S+)", told)
    check_history(run_dir, within_s=60)
    run = raysgd.load_run(run_dir)
    assert run.outcome == "done"
    assert run.metrics["epoch"].tolist() == list(range(60))
    failures = run.events[run.events["kind"] == "failure"]
    (told,) = re.findall(rf"{len(killed)} workers killed, (\d+) failures survived", told)
    assert 1 <= len(failures) == int(told)
