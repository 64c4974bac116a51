"""A disk is full, or its writes wait: the disk of one machine, and the storage that all machines share."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import raysgd
from support.drives import START_S, Drives, events_of, trains
from support.machines import Machines, freeze
from support.poll import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

FULL = "No space left on device"
#: State of 8 MB, of which there are three on storage and two in memory.
SAVES = {"config": {"steps": 1500, "sleep_s": 0.08, "state_mb": 8}, "checkpoint": {"num_to_keep": 3}}


def fill(disk: Path) -> Path:
    """Write a file until the disk is full; return it."""
    path = disk / "filling"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(b"0")
    return path


@pytest.fixture
def local_disk(machines: Machines, tmp_path: Path) -> Iterator[Path]:
    """Give machine 2 a small disk for all files of Ray, such as logs and spilled objects; yield it."""
    machines.kill(2)
    machines.boot(2)
    with machines.small_disk(machines.folder / "disk-2", 200, {2: "/tmp/ray"}) as disk:
        machines.start_ray(2)
        yield disk
        machines.kill(2)


def test_disk_of_a_machine_is_full(machines: Machines, local_disk: Path, drives: Drives) -> None:
    """Workers there train and save on; when one of them dies, the run resumes from a checkpoint."""
    driver = drives.start(workers=[2, 6], **SAVES)
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] > 20, START_S)
    filling = fill(local_disk)
    step = driver.results()[-1]["step"]
    driver.wait_for(lambda result: result["step"] > step + 100, 60)
    machines.signal(2, "ray::WorkerActor", signal.SIGKILL)
    driver.wait_for(lambda result: result["attempt"] > 1 and result["step"] > step + 110, 60)
    filling.unlink()
    driver.wait_for(trains(6, attempt=3), START_S)
    driver.stop()
    driver.wait_over(failures=1)


def test_writes_to_the_disk_of_a_machine_wait(machines: Machines, local_disk: Path, drives: Drives) -> None:
    driver = drives.start(workers=[2, 6], **SAVES)
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] > 20, START_S)
    for waits_s in (3, 15):
        with freeze(local_disk):
            time.sleep(waits_s)
        began = time.time()
        driver.wait_for(lambda result, began=began: result["at"] > began and result["size"] == 6, START_S)
    driver.stop()
    driver.wait_over()


@pytest.fixture
def shared_disk(machines: Machines) -> Iterator[Path]:
    """Give all machines a small disk for the storage of runs; yield it."""
    folder = machines.folder / "small"
    with machines.small_disk(folder, 120, {machine: str(folder) for machine in range(3)}) as disk:
        yield disk


def test_run_continues_when_there_is_room_again(machines: Machines, shared_disk: Path, drives: Drives) -> None:
    saves = SAVES | {"checkpoint": {"num_to_keep": 3, "on_write_error": "warn"}}
    driver = drives.start(folder=shared_disk / "warn", workers=[2, 6], **saves)
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] > 20, START_S)
    filling = fill(shared_disk)
    assert until(lambda: FULL in driver.text, 30, 0.2), driver.text[-3000:]
    step = driver.results()[-1]["step"]
    driver.wait_for(lambda result: result["step"] > step + 30, 30)
    filling.unlink()
    step = driver.results()[-1]["step"]
    driver.wait_for(lambda result: result["step"] > step + 30, 30)
    machines.signal(2, "ray::WorkerActor", signal.SIGKILL)
    again = driver.wait_for(lambda result: result["attempt"] > 1, 30)
    assert again["step"] > step, "no checkpoint was saved after room was made"
    driver.stop()
    run = driver.wait_over(failures=1)
    assert any(FULL in event["message"] for event in events_of(run, "warning"))
    check_checkpoints(run)


def test_run_that_ends_on_a_full_disk_is_restored(machines: Machines, shared_disk: Path, drives: Drives) -> None:
    driver = drives.start(folder=shared_disk / "raise", workers=[2, 6], **SAVES)
    driver.wait_for(lambda result: result["size"] == 6 and result["step"] > 20, START_S)
    filling = fill(shared_disk)
    assert driver.process.wait(90) != 0
    assert "could not be written" in driver.text and FULL in driver.text
    last = driver.check_results()[-1]
    filling.unlink()
    check_checkpoints(raysgd.load_run(driver.run_dir))
    config = {**SAVES["config"], "steps": last + 40}
    again = drives.start(folder=shared_disk / "raise", workers=[2, 6], restore=str(driver.run_dir), config=config)
    assert again.process.wait(START_S) == 0, again.text[-5000:]
    first = again.results()[0]["step"]
    assert 10 < first <= last + 1, "it did not resume from a checkpoint"
    assert again.check_results(first)[-1] == last + 40


def check_checkpoints(run: raysgd.LoadedRun) -> None:
    """Check that all checkpoints of a run are whole."""
    assert run.checkpoints
    for checkpoint in run.checkpoints:
        assert checkpoint.load()["count"] == checkpoint.iteration
