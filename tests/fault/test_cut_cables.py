"""Cables between machines are pulled and plugged in again, and machines are lost. The machines are namespaces of this one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing import check_history
from support.machines import Machines, wait_for_seconds, why_impossible
from support.poll import until

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(280),
    pytest.mark.skipif(why_impossible() is not None, reason=f"machines cannot be made: {why_impossible()}"),
]

#: Seconds for a group to start on the machines.
START_S = 90.0
#: `FailureConfig.heartbeat_timeout_s`, and what the checks of processes and the next attempt take on a busy machine.
GIVEN_UP_S = 10 + 8


@dataclass
class Drive:
    """A driver on a machine, and what it has written."""

    process: subprocess.Popen[bytes]
    output: Path
    storage: Path

    @property
    def text(self) -> str:
        return self.output.read_text()

    def results(self) -> list[dict[str, Any]]:
        lines = self.text.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith('{"step"') and line.endswith("}\n")]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        """Return the first result for which the condition holds."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [result for result in self.results() if condition(result)][:1]
            return bool(found) or self.process.poll() is not None

        until(look, timeout_s, 0.2)
        assert found, f"no such result within {timeout_s} s\n{self.text[-5000:]}"
        return found[0]

    def wait_over(self, timeout_s: float = 120) -> raysgd.RunResult:
        """Wait for the driver's end; return the run, whose history holds."""
        assert self.process.wait(timeout_s) == 0, self.text[-5000:]
        assert "over" in self.text.splitlines(), self.text[-5000:]  # Ray may forward output of workers after it
        check_history(str(self.run_dir), within_s=60)
        return raysgd.load_run(self.run_dir)

    @property
    def run_dir(self) -> Path:
        return self.storage / "cut" / "run_001"


def events_of(run: Any, kind: str) -> list[dict[str, Any]]:
    return list(run.events[run.events["kind"] == kind]["data"])


@pytest.fixture
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Yield three machines of two CPUs, without Ray."""
    with Machines(tmp_path_factory.mktemp("machines"), 3) as made:
        yield made


@pytest.fixture
def drive(machines: Machines) -> Callable[..., Drive]:
    """Return a function that starts the driver of a run on a machine."""

    def start(machine: int = 0, **settings: Any) -> Drive:
        shared = machines.folder / "shared"
        shared.mkdir()
        command = [sys.executable, "-m", "support.cut_job", str(shared / "runs"), json.dumps(settings)]
        process = machines.start(machine, *command, output=shared / "output")
        return Drive(process, shared / "output", shared / "runs")

    return start


def trains(size: int, attempt: int = 1) -> Callable[[dict[str, Any]], bool]:
    return lambda result: result["size"] == size and result["attempt"] >= attempt


def test_elastic_group_grows_back_after_a_cable_was_out(machines: Machines, drive: Callable[..., Drive]) -> None:
    """25 s is longer than the heartbeat timeout, and shorter than Ray takes to count the node as lost."""
    machines.start_ray()
    driver = drive(workers=[2, 6], config={"steps": 700, "sleep_s": 0.08})
    driver.wait_for(trains(6), START_S)
    cut = time.monotonic()
    machines.plug(2, is_in=False)
    driver.wait_for(trains(4), GIVEN_UP_S)
    wait_for_seconds(cut + 25)
    machines.plug(2, is_in=True)
    driver.wait_for(trains(6, attempt=3), START_S)
    run = driver.wait_over()
    sizes = [event["new"] for event in events_of(run, "resize")]
    assert sizes[0] == 4 and sizes[-1] == 6 and sizes == sorted(sizes)  # on a busy machine its workers come one by one
    assert len(events_of(run, "failure")) == 1


def test_fixed_group_waits_for_its_node_and_continues_in_the_same_attempt(
    machines: Machines, drive: Callable[..., Drive]
) -> None:
    machines.start_ray()
    driver = drive(workers=6, config={"steps": 150}, failure={"max_failures": 0})
    first = driver.wait_for(trains(6), START_S)
    machines.plug(2, is_in=False)
    time.sleep(15)
    machines.plug(2, is_in=True)
    run = driver.wait_over()
    results = driver.results()
    assert [result["step"] for result in results] == list(range(1, 151)), "no step is repeated"
    assert results[-1]["pids"] == first["pids"] and results[-1]["total"] == 150.0
    (waits,) = [event["message"] for event in events_of(run, "warning") if "no answer from" in event["message"]]
    assert "machine-2" in waits and "for 120 s at most" in waits


def test_short_cut_is_no_failure(machines: Machines, drive: Callable[..., Drive]) -> None:
    machines.start_ray()
    driver = drive(workers=6, config={"steps": 150}, failure={"max_failures": 0})
    driver.wait_for(trains(6), START_S)
    machines.plug(2, is_in=False)
    time.sleep(6)
    machines.plug(2, is_in=True)
    run = driver.wait_over()
    assert [result["step"] for result in driver.results()] == list(range(1, 151))
    assert not any("killed" in event["message"] for event in events_of(run, "warning"))


def test_run_continues_after_the_controllers_node_was_cut_off(machines: Machines, drive: Callable[..., Drive]) -> None:
    """The controller cannot reach the GCS either, which is on the head."""
    machines.start_ray()
    driver = drive(1, workers=[2, 4], config={"steps": 400, "sleep_s": 0.08}, failure={"max_failures": 10})
    driver.wait_for(trains(4), START_S)
    machines.plug(1, is_in=False)
    time.sleep(15)
    machines.plug(1, is_in=True)
    run = driver.wait_over()
    assert any("(GCS)" in event["message"] for event in events_of(run, "warning"))
    assert not events_of(run, "blocked_loop")


def test_each_row_is_read_once_through_a_lost_machine_and_a_cut(
    machines: Machines, drive: Callable[..., Drive]
) -> None:
    machines.start_ray()
    driver = drive(workers=[2, 6], config={"steps": 10_000, "sleep_s": 0.1, "rows": 24_000})
    driver.wait_for(trains(6), START_S)
    time.sleep(2)
    machines.kill(2)
    driver.wait_for(trains(4), GIVEN_UP_S)
    machines.boot(2)
    machines.start_ray(2)
    driver.wait_for(trains(6, attempt=3), 60)
    machines.plug(1, is_in=False)
    time.sleep(8)
    machines.plug(1, is_in=True)
    driver.wait_over()
    counted: dict[int, list[int]] = {}
    for result in driver.results():
        counted[result["step"]] = result["rows"]  # a later attempt makes the steps after its checkpoint again
    rows = Counter(row for rows in counted.values() for row in rows)
    assert set(rows) == set(range(24_000)) and set(rows.values()) == {1}


def test_driver_of_a_run_whose_head_is_lost_names_how_it_is_resumed(
    machines: Machines, drive: Callable[..., Drive]
) -> None:
    machines.start_ray(0, 1)
    driver = drive(1, workers=4, config={"steps": 100_000})
    driver.wait_for(trains(4), START_S)
    machines.kill(0)
    driver.process.wait(120)
    assert f"raysgd.Trainer.restore('{driver.run_dir}')" in driver.text


def test_detached_trainer_starts_on_the_drivers_machine(machines: Machines, drive: Callable[..., Drive]) -> None:
    machines.start_ray()
    driver = drive(1, workers=[2, 4], config={"steps": 100}, run={"detached": True}, leave_at=20)
    driver.process.wait(START_S)
    with_controller = [
        machine for machine in range(3) if "ray::TrainerActor" in machines.run(machine, "ps", "ax", "-o", "args")
    ]
    assert with_controller == [1]
