"""A cable is pulled at the worst moments: in an all-reduce, a commit, a resize, and while a worker joins."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.drives import GIVEN_UP_S, START_S, Drive, Drives, make_whole, trains
from support.machines import Machines
from support.poll import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]


def machine_of_rank(driver: Drive, rank: int) -> int:
    """Return the machine on which a rank runs."""
    return int(driver.results()[-1]["pids"][rank].split(":")[0].removeprefix("machine-"))


@pytest.mark.parametrize("workers", [6, [2, 6]], ids=["waits", "continues"])
def test_cut_in_an_all_reduce(machines: Machines, drives: Drives, workers: Any) -> None:
    """A fixed group completes the all-reduce when the cable is back; an elastic one makes it again with fewer ranks."""
    driver = drives.start(workers=workers, config={"steps": 1500, "sleep_s": 0.08, "reduce_at": 23})
    driver.wait_for_file("reducing", START_S)
    machines.plug(2, is_in=False)
    assert not (driver.folder / "reduced").exists(), "the all-reduce was over before the cut"
    if workers == 6:
        time.sleep(12)
    else:
        driver.wait_for(trains(4), 2 * GIVEN_UP_S)
    machines.plug(2, is_in=True)
    driver.wait_for(lambda result: result["step"] >= 40, START_S)
    if workers != 6:
        make_whole(machines, driver)
    driver.stop()
    driver.wait_over(failures=0 if workers == 6 else 1)
    assert workers != 6 or {result["attempt"] for result in driver.results()} == {1}


def test_cut_in_the_commit_of_a_checkpoint(machines: Machines, drives: Drives) -> None:
    """The machine of rank 0 is cut off while its part is written: the manifest waits for a message that does not come."""
    driver = drives.start(
        1,
        workers=[2, 6],
        slow_write={"checkpoint": 5, "delay_s": 3.0},
        config={"steps": 1500, "sleep_s": 0.08, "state_mb": 20},
    )
    driver.wait_for_file("faults/fault-00000.json", START_S)
    machine = machine_of_rank(driver, 0)
    machines.plug(machine, is_in=False)
    time.sleep(20)
    make_whole(machines, driver)
    driver.stop()
    run = driver.wait_over()
    for checkpoint in run.checkpoints:
        assert checkpoint.load()["count"] == checkpoint.iteration, "a checkpoint is damaged"


def test_cut_while_large_checkpoints_are_written(machines: Machines, drives: Drives) -> None:
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.1, "save_every": 3, "state_mb": 60})
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] >= 10, START_S)
    machines.plug(2, is_in=False)
    driver.wait_for(trains(4), 2 * GIVEN_UP_S)
    make_whole(machines, driver)
    driver.stop()
    driver.wait_over(failures=1)


def test_cut_in_a_resize(machines: Machines, drives: Drives) -> None:
    """The cable of another machine is pulled as soon as the group has given up the first one."""
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.08}, failure={"max_failures": 10})
    driver.wait_for(trains(6), START_S)
    machines.plug(2, is_in=False)
    events = driver.run_dir / "events.jsonl"
    assert until(lambda: '"failure"' in events.read_text(), 2 * GIVEN_UP_S, 0.01), events.read_text()[-3000:]
    machines.plug(1, is_in=False)
    driver.wait_for(trains(2), 3 * GIVEN_UP_S)
    make_whole(machines, driver)
    driver.stop()
    driver.wait_over()


def test_cut_while_a_worker_joins(machines: Machines, drives: Drives) -> None:
    """The four others train on, and the machine joins later."""
    machines.kill(2)
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.08}, failure={"max_failures": 0})
    driver.wait_for(trains(4), START_S)
    machines.boot(2)
    machines.start_ray(2)
    assert until(lambda: "ray::WorkerActor" in machines.run(2, "ps", "ax", "-o", "args"), 60, 0.05)
    machines.plug(2, is_in=False)
    step = driver.results()[-1]["step"]
    time.sleep(14)
    assert driver.results()[-1]["step"] > step + 50, "the others did not train on"
    machines.plug(2, is_in=True)
    driver.wait_for(trains(6), START_S)
    driver.stop()
    driver.wait_over(failures=0)
