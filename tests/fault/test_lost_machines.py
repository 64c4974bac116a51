"""Machines are lost, taken away with notice, and come back. The machines are namespaces of this one."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from support.drives import GIVEN_UP_S, START_S, Drive, Drives, events_of, trains
from support.machines import Machines
from support.poll import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]


def test_run_continues_through_a_lost_machine_and_a_cut(machines: Machines, drives: Drives) -> None:
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.08})
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] > 20, START_S)
    machines.kill(2)
    driver.wait_for(trains(4), GIVEN_UP_S)
    machines.make_whole()
    driver.wait_for(trains(6, attempt=3), START_S)
    machines.plug(1, is_in=False)
    time.sleep(8)
    machines.plug(1, is_in=True)
    before = len(driver.results())
    assert until(lambda: len(driver.results()) > before + 10, START_S, 0.2)
    driver.stop()
    driver.wait_over()  # on a busy machine, a cut of 8 s may be a failure


def test_lost_machine_costs_a_training_with_a_live_state_one_step(machines: Machines) -> None:
    """Ranks of another machine hold the state. The driver checks what each attempt started from, and the rows of all steps."""
    digests = []
    for name in ("calm", "killed"):
        folder, output = machines.folder / f"live-{name}", machines.folder / f"live-{name}.out"
        process = machines.start(0, sys.executable, "-m", "support.live_job", str(folder), output=output)
        steps = folder / "done"

        def has_trained(steps: Path = steps) -> bool:
            return sum(path.read_text().count("\n") for path in steps.glob("1-0-*")) > 4 * 20

        assert until(lambda: has_trained() or process.poll() is not None, START_S, 0.2), output.read_text()[-3000:]  # noqa: B023
        if name == "killed":
            machines.kill(2)
        assert process.wait(START_S) == 0, output.read_text()[-5000:]
        digests.append((folder / "digest").read_text())
    assert {path.name.split("-")[0] for path in steps.iterdir()} == {"1", "2"}, "the run had no second attempt"
    assert digests[0] == digests[1]


def test_run_is_restored_when_the_lost_head_is_back(machines: Machines, drives: Drives) -> None:
    """Ray's state is lost with the head: the driver says how the run is resumed, and ends."""
    driver = drives.start(1, workers=[2, 4], config={"steps": 1500, "sleep_s": 0.08})
    driver.wait_for(lambda result: result["step"] > 50, START_S)
    machines.kill(0)
    assert driver.process.wait(120) != 0
    assert f"raysgd.Trainer.restore('{driver.run_dir}')" in driver.text
    last = driver.check_results()[-1]
    machines.make_whole()
    again = drives.start(1, workers=[2, 4], restore=str(driver.run_dir), config={"steps": last + 60, "sleep_s": 0.02})
    assert again.process.wait(START_S) == 0, again.text[-5000:]
    first = again.results()[0]["step"]
    assert 50 - 5 < first <= last + 1, "it did not resume from the newest checkpoint"
    assert again.check_results(first)[-1] == last + 60


def test_detached_trainer_starts_on_the_drivers_machine(machines: Machines, drives: Drives) -> None:
    driver = drives.start(1, workers=[2, 4], config={"steps": 100}, run={"detached": True}, leave_at=20)
    driver.process.wait(START_S)
    with_controller = [
        machine for machine in range(3) if "ray::TrainerActor" in machines.run(machine, "ps", "ax", "-o", "args")
    ]
    assert with_controller == [1]


def check_left_without_a_failure(driver: Drive) -> None:
    """Check that a run of six left machine 2 out of a save: four continue, and no step was made again."""
    first_of_four = driver.wait_for(trains(4), 40)
    assert all(not pid.startswith("machine-2:") for pid in first_of_four["pids"])
    driver.wait_for(lambda result: result["step"] > first_of_four["step"] + 10, START_S)
    driver.stop()
    run = driver.wait_over(failures=0)
    (preemption, *_) = events_of(run, "preemption")
    print(preemption)
    assert "machine-2" in str(preemption)
    steps = [result["step"] for result in driver.results()]
    assert steps == list(range(1, len(steps) + 1)), "a step was made again"


@pytest.mark.parametrize("drain_s", [None, 0], ids=["with a drain", "without one"])
def test_pod_gets_sigterm(machines: Machines, drives: Drives, drain_s: int | None) -> None:
    """Kubernetes sends SIGTERM to ``ray start --block``; Ray drains the node for 30 s, unless it is set not to."""
    machines.kill(2)
    machines.boot(2)
    environment = {} if drain_s is None else {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_s)}
    machines.start_pod(2, machines.folder / "pod", environment)
    failure = {"max_failures": 0 if drain_s is None else 1}
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.08}, failure=failure)
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] > 20, START_S)
    began = time.time()
    machines.signal(2, "ray start", signal.SIGTERM)
    four = driver.wait_for(trains(4), 40)
    print(f"four train {four['at'] - began:.1f} s after SIGTERM")
    try:
        if drain_s is None:
            check_left_without_a_failure(driver)
        else:
            driver.stop()
            driver.wait_over()
    finally:
        machines.kill(2)


def test_drained_node_is_left(machines: Machines, drives: Drives) -> None:
    """A spot node that has 60 s left says so by ``ray drain-node``."""
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.08}, failure={"max_failures": 0})
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] > 20, START_S)
    reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=60"]
    began = time.time()
    announced = machines.run(2, "ray", "drain-node", f"--address={machines.address(0)}:6379", *reason)
    print(announced)
    four = driver.wait_for(trains(4), 40)
    print(f"four train {four['at'] - began:.1f} s after the notice")
    try:
        check_left_without_a_failure(driver)
    finally:
        machines.kill(2)
