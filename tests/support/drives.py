"""Drivers of `support.cut_job` on machines, and what must hold of each of their runs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raysgd
from raysgd.testing import check_history
from support.cut_job import NUM_LOGICAL, NUM_ROWS
from support.machines import Machines
from support.pace import slowness
from support.poll import until
from support.project import ROOT

#: Seconds for a group to start on the machines.
START_S = 90.0
#: `FailureConfig.heartbeat_timeout_s`, and what the checks of processes and the next attempt take on a busy machine.
GIVEN_UP_S = 10 + 8
#: Seconds until a group has its full size again: a node that was lost four times is on probation for 40.
WHOLE_S = 150.0
#: The steps of the longest run, and those of an epoch.
MAX_STEPS = 1500
STEPS_PER_EPOCH = 100


@dataclass
class Drive:
    """A driver on a machine, and what it has written.

    Attributes:
        folder: The run's storage, which the machines see, with the files of `support.cut_job`.
        settings: Those of the driver.
    """

    process: subprocess.Popen[bytes]
    output: Path
    folder: Path
    settings: dict[str, Any]

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def run_dir(self) -> Path:
        return self.folder / "cut" / "run_001"

    def results(self) -> list[dict[str, Any]]:
        lines = self.text.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith('{"step"') and line.endswith("}\n")]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        """Return the first result for which the condition holds; a slow machine has more time."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [result for result in self.results() if condition(result)][:1]
            return bool(found) or self.process.poll() is not None

        until(look, timeout_s * slowness(), 0.2)
        assert found, f"no such result within {timeout_s} s\n{self.text[-5000:]}"
        return found[0]

    def wait_for_file(self, name: str, timeout_s: float = 60) -> None:
        """Wait for a file of the storage folder, and return at once."""
        assert until((self.folder / name).exists, timeout_s * slowness(), 0.002), (
            f"{name} is not there\n{self.text[-5000:]}"
        )

    def stop(self) -> None:
        """Let the run end at its next result."""
        (self.folder / "enough").touch()

    def wait_over(self, timeout_s: float = 120, *, failures: int | None = None) -> Any:
        """Wait for the driver's end, and check what must hold of each run; return the run.

        Its history holds, all ranks had the weights of the undisturbed run after each step, to the bit, and of each epoch
        each row was trained on once.

        Args:
            timeout_s: A run that is not over by then hangs.
            failures: The number of failures; None: any.
        """
        assert self.process.wait(timeout_s * slowness()) == 0, self.text[-5000:]
        assert "over" in self.text.splitlines(), self.text[-5000:]  # Ray may forward output of workers after it
        check_history(str(self.run_dir), within_s=60)
        steps = self.check_results()
        if not (self.folder / "enough").exists():
            assert steps[-1] == self.settings["config"]["steps"]
        run = raysgd.load_run(self.run_dir)
        if failures is not None:
            assert len(events_of(run, "failure")) == failures, events_of(run, "failure")
        return run

    def check_results(self, first: int = 1) -> list[int]:
        """Check the weights and rows of all results; return the steps, which have no gap from ``first`` on."""
        undisturbed = make_undisturbed_results()
        counted: dict[int, list[int]] = {}
        for result in self.results():
            expected = undisturbed[result["step"] - 1]
            about = f"step {result['step']} of attempt {result['attempt']}"
            assert result["all_weights"] == [expected["weights"]], f"{about} has other weights"
            counted[result["step"]] = result["rows"]  # a later attempt makes the steps after its checkpoint again
        steps = sorted(counted)
        assert steps == list(range(first, steps[-1] + 1)), "steps are missing"
        epochs: dict[int, list[int]] = {}
        for step in steps:
            epochs.setdefault((step - 1) // STEPS_PER_EPOCH, []).extend(counted[step])
        for number, rows in epochs.items():
            assert set(Counter(rows).values()) == {1}, "a row was trained on twice in an epoch"
            if first <= number * STEPS_PER_EPOCH + 1 and steps[-1] >= (number + 1) * STEPS_PER_EPOCH:
                assert len(rows) == NUM_ROWS, "a row is missing"
        return steps


@functools.cache
def make_undisturbed_results() -> list[dict[str, Any]]:
    """Return the results of the longest run on one worker of this machine, without any fault."""
    settings = {"workers": 1, "config": {"steps": MAX_STEPS, "sleep_s": 0, "save_every": MAX_STEPS}}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "support.cut_job", f"{folder}/runs", json.dumps(settings)],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                    "RAY_ADDRESS": "local",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            process.wait(240)
        finally:
            process.kill()
        results = Drive(process, output, Path(folder), settings).results()
        assert [result["step"] for result in results] == list(range(1, MAX_STEPS + 1)), output.read_text()[-3000:]
    assert len(results[0]["rows"]) == 8 * NUM_LOGICAL
    return results


class Drives:
    """Starts drivers on machines; at the end of a test they are over, or the machines are killed."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._drives: list[Drive] = []

    def start(
        self,
        machine: int = 0,
        *,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> Drive:
        """Start a driver with the settings of `support.cut_job`, and a new storage folder if none is given."""
        make_undisturbed_results()  # before the machines are busy
        number = len(list(self._machines.folder.glob("output-*")))
        folder = folder or self._machines.folder / f"storage-{number}"
        folder.mkdir(exist_ok=True)
        output = self._machines.folder / f"output-{number}"
        command = [sys.executable, "-m", "support.cut_job", str(folder), json.dumps(settings)]
        process = self._machines.start(machine, *command, output=output, environment=environment)
        self._drives.append(Drive(process, output, folder, settings))
        return self._drives[-1]

    def end(self) -> None:
        """Kill all machines if a driver is left."""
        if any(drive.process.poll() is None for drive in self._drives):
            self._machines.kill_all()


def cut(machines: Machines, machine: int, for_s: float) -> float:
    """Pull a machine's cable for some seconds; return when it is in again, in seconds since the epoch."""
    machines.plug(machine, is_in=False)
    time.sleep(for_s)
    machines.plug(machine, is_in=True)
    return time.time()


def make_whole(machines: Machines, driver: Drive) -> None:
    """Plug all cables in, and wait until the group has its full size.

    A machine that Ray counted as lost, as it does on a busy machine in a shorter cut, is started again.
    """
    since = time.time()

    def is_whole() -> bool:
        machines.make_whole()
        return any(result["at"] > since and result["size"] == 6 for result in driver.results())

    assert until(is_whole, WHOLE_S * slowness(), 5), driver.text[-5000:]


def grow_after_a_cut(machines: Machines, drives: Drives) -> tuple[Drive, float]:
    """Cut a machine of an elastic run off for 25 s; return the run of full size, and its time after the cable was in.

    25 s is longer than the heartbeat timeout, and shorter than Ray takes to count the node as lost.
    """
    driver = drives.start(workers=[2, 6], config={"steps": MAX_STEPS, "sleep_s": 0.08})
    driver.wait_for(trains(6), START_S)
    began = time.monotonic()
    machines.plug(2, is_in=False)
    driver.wait_for(trains(4), GIVEN_UP_S)
    time.sleep(max(0.0, began + 25 - time.monotonic()))
    machines.plug(2, is_in=True)
    plugged_in_at = time.time()
    return driver, driver.wait_for(trains(6, attempt=3), START_S)["at"] - plugged_in_at


def continue_after_a_cut_of_the_controller(machines: Machines, drives: Drives) -> tuple[Drive, float]:
    """Cut the controller's machine off for 15 s; return the run, and its next step's time after the cable was in.

    The controller cannot reach the GCS either, which is on the head.
    """
    settings = {"config": {"steps": MAX_STEPS, "sleep_s": 0.08}, "failure": {"max_failures": 10}}
    driver = drives.start(1, workers=[2, 4], **settings)
    driver.wait_for(trains(4), START_S)
    plugged_in_at = cut(machines, 1, 15)
    return driver, driver.wait_for(lambda result: result["at"] > plugged_in_at, START_S)["at"] - plugged_in_at


def events_of(run: Any, kind: str) -> list[dict[str, Any]]:
    return list(run.events[run.events["kind"] == kind]["data"])


def trains(size: int, attempt: int = 1) -> Callable[[dict[str, Any]], bool]:
    """Return the condition that a result is of a group of this size, in this attempt or a later one."""
    return lambda result: result["size"] == size and result["attempt"] >= attempt
