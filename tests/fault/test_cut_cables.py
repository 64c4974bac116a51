"""Cables between machines are pulled and plugged in again. The machines are namespaces of this one."""

from __future__ import annotations

import time

import pytest

from support.drives import (
    GIVEN_UP_S,
    START_S,
    Drives,
    continue_after_a_cut_of_the_controller,
    cut,
    events_of,
    grow_after_a_cut,
    trains,
)
from support.machines import Machines

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]


def test_elastic_group_grows_back_after_a_cable_was_out(machines: Machines, drives: Drives) -> None:
    driver, seconds = grow_after_a_cut(machines, drives)
    print(f"back to full size {seconds:.1f} s after the cable")
    driver.stop()
    run = driver.wait_over(failures=1)
    sizes = [event["new"] for event in events_of(run, "resize")]
    assert sizes[0] == 4 and sizes[-1] == 6 and sizes == sorted(sizes)  # on a busy machine its workers come one by one


def test_fixed_group_waits_for_its_node_and_continues_in_the_same_attempt(machines: Machines, drives: Drives) -> None:
    driver = drives.start(workers=6, config={"steps": 150}, failure={"max_failures": 0})
    first = driver.wait_for(trains(6), START_S)
    cut(machines, 2, 15)
    run = driver.wait_over()
    results = driver.results()
    assert [result["step"] for result in results] == list(range(1, 151)), "no step is repeated"
    assert results[-1]["pids"] == first["pids"]
    (waits,) = [event["message"] for event in events_of(run, "warning") if "no answer from" in event["message"]]
    assert "machine-2" in waits and "for 120 s at most" in waits


def test_short_cut_is_no_failure(machines: Machines, drives: Drives) -> None:
    driver = drives.start(workers=6, config={"steps": 150}, failure={"max_failures": 0})
    driver.wait_for(trains(6), START_S)
    cut(machines, 2, 6)
    run = driver.wait_over()
    assert [result["step"] for result in driver.results()] == list(range(1, 151))
    assert not any("killed" in event["message"] for event in events_of(run, "warning"))


def test_two_cuts_one_shorter_and_one_longer_than_the_heartbeat_timeout(machines: Machines, drives: Drives) -> None:
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.08})
    driver.wait_for(trains(6), START_S)
    cut(machines, 2, 4)
    before = driver.results()[-1]["step"]
    driver.wait_for(lambda result: result["step"] > before + 5, START_S)
    assert {result["attempt"] for result in driver.results()} == {1}
    cut(machines, 2, 13)
    driver.wait_for(lambda result: result["attempt"] > 1, START_S)
    driver.wait_for(trains(6, attempt=3), START_S)
    driver.stop()
    driver.wait_over(failures=1)


def test_two_cables_are_out_at_once(machines: Machines, drives: Drives) -> None:
    """The group continues with the two workers of the controller's machine, and grows back to six."""
    driver = drives.start(workers=[2, 6], config={"steps": 1500, "sleep_s": 0.08})
    driver.wait_for(trains(6), START_S)
    for is_in in (False, True):
        machines.plug(1, is_in=is_in)
        machines.plug(2, is_in=is_in)
        if not is_in:
            driver.wait_for(trains(2), 2 * GIVEN_UP_S)
    driver.wait_for(trains(6, attempt=3), START_S)
    driver.stop()
    driver.wait_over()


def test_cable_that_is_out_every_other_second_ends_no_attempt(machines: Machines, drives: Drives) -> None:
    driver = drives.start(workers=6, config={"steps": 400}, failure={"max_failures": 0})
    first = driver.wait_for(trains(6), START_S)
    for _ in range(20):
        cut(machines, 2, 1)
        time.sleep(1)
    driver.wait_over(failures=0)
    results = driver.results()
    assert [result["step"] for result in results] == list(range(1, 401)) and results[-1]["pids"] == first["pids"]


def test_run_continues_after_the_controllers_node_was_cut_off(machines: Machines, drives: Drives) -> None:
    driver, seconds = continue_after_a_cut_of_the_controller(machines, drives)
    print(f"first step {seconds:.1f} s after the cable")
    step = driver.results()[-1]["step"]
    driver.wait_for(lambda result: result["step"] > step + 10, START_S)
    driver.stop()
    run = driver.wait_over()
    assert any("(GCS)" in event["message"] for event in events_of(run, "warning"))
    assert not events_of(run, "blocked_loop")
