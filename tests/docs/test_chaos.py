"""``examples/04_chaos.py``: its log, the accuracy, and the promises of raysgd in the run's files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import raysgd
from raysgd.testing import check_history
from support.examples import run_example

EXAMPLE = "04_chaos.py"


@pytest.mark.fault
@pytest.mark.timeout(400)
def test_network_learns_while_workers_are_killed(tmp_path: Path) -> None:
    output = run_example(EXAMPLE, "--kills", "3", "--seconds", "4", folder=tmp_path)
    (accuracy,) = re.findall(r"test accuracy of the returned model: (\S+)", output)
    assert float(accuracy) >= 0.97

    killed = re.findall(r"killed rank \d+ on pid (\d+)", output)
    assert killed, output
    for pid in killed:
        after = output.partition(f"on pid {pid}")[2]
        assert re.search(r"continued with [234] workers", after), (
            f"training did not continue after the death of {pid}:\n{output}"
        )

    *_, last_death = re.finditer(r"death of .*", output)
    assert "continued with" in output[last_death.end() :]

    (run_dir,) = re.findall(r"run directory: (\S+)", output)
    check_history(run_dir, within_s=60)
    run = raysgd.load_run(run_dir)
    assert run.outcome == "done"
    assert run.metrics["epoch"].tolist() == list(range(60))
    failures = run.events[run.events["kind"] == "failure"]
    (survived,) = re.findall(rf"{len(killed)} workers killed, (\d+) failures survived", output)
    assert 1 <= len(failures) == int(survived)
