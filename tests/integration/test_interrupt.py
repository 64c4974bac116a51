"""Ctrl-C and SIGTERM in a driver: the run saves and ends; the second signal ends it at once. Both leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import raysgd
from support.poll import until
from support.project import ROOT
from support.runs import PATIENCE_S

SCRIPT = """
import os
import sys
import time

import ray

import raysgd

folder, how = sys.argv[1:]


def train_func(config):
    step = 0
    while True:
        is_leaving = config["how"] == "checks" and raysgd.should_stop()
        if is_leaving or config["how"] != "checks":
            raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
        if is_leaving:
            return
        if step == 5:
            open(f"{config['folder']}/training-{raysgd.world_rank()}-{os.getpid()}", "w").close()
            while config["how"] == "silent":
                time.sleep(0.05)
            if config["how"] == "stubborn":
                while True:
                    try:
                        time.sleep(1)
                    except BaseException:
                        pass
            if config["how"] == "collective":
                import torch
                import torch.distributed as dist

                dist.recv(torch.ones(()), src=1 - raysgd.world_rank())  # each rank waits for the other in native code
        step += 1
        time.sleep(0.01)


ray.init(address="local", num_cpus=2, include_dashboard=False)
failure = raysgd.FailureConfig(
    abort_grace_s=30 if how in ("stubborn", "collective") else 2, stop_grace_s=0.5 if how == "silent" else 30
)
backend = "torch" if how in ("collective", "cold") else "none"
trainer = raysgd.Trainer(2, backend, run_config=raysgd.RunConfig(storage_path=folder), failure_config=failure)
config = {"folder": folder, "how": how}
try:
    if how == "generator":
        with trainer:
            for result in trainer.run_generator(train_func, config):
                pass
    else:
        trainer.run(train_func, config)
except (KeyboardInterrupt, SystemExit):
    open(f"{folder}/raised", "w").close()
    free = ray.available_resources().get("CPU")
    deadline = time.monotonic() + 20
    while free != 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        free = ray.available_resources().get("CPU")
    print("interrupted, free:", free, flush=True)
    raise
"""


class Driver:
    """A driver script that trains until it is interrupted."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder = folder
        self.errors = folder / "stderr.txt"
        (folder / "driver.py").write_text(SCRIPT)
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "driver.py", str(folder), how],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        is_there = self.has_a_controller if how == "cold" else lambda: len(self.workers()) == 2
        assert until(lambda: is_there() or self.process.poll() is not None, PATIENCE_S)
        if self.process.poll() is not None:
            raise AssertionError(self.process.communicate()[0] + self.errors.read_text())
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[int]:
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob("training-*")]

    def has_a_controller(self) -> bool:
        """Whether a TrainerActor exists, which is about to start workers."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        return any("ray::TrainerActor" in title for title in map(_title, processes))

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def ends(self) -> tuple[str, str]:
        """Wait for the end, check that nothing is left, and return the output and the errors."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        _, alive = psutil.wait_procs(self.family, timeout=30)
        assert not alive, [process.cmdline() for process in alive]
        return out, self.errors.read_text()

    def kill(self) -> None:
        for process in [*self.family, psutil.Process(self.process.pid)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    def start(how: str) -> Driver:
        driver = Driver(tmp_path, how)
        request.addfinalizer(lambda: driver.kill() if driver.process.poll() is None else None)
        return driver

    return start


@pytest.mark.parametrize("how", ["run", "generator", "checks"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_makes_the_run_save_and_end(start: Any, tmp_path: Path, how: str, number: signal.Signals) -> None:
    driver = start(how)
    driver.interrupt(number)
    out, err = driver.ends()
    assert driver.process.returncode == (1 if number == signal.SIGINT else signal.SIGTERM)
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert "interrupted, free: 2.0" in out, "resources were held until the driver's end"
    again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
    assert f"stopping: the run saves a checkpoint and ends, within 30 s; {again} stops it at once" in err
    (run_dir,) = tmp_path.glob("train_func_*/run_001")
    run = raysgd.load_run(run_dir)
    assert run.outcome == "stopped"
    last = run.checkpoints[-1]
    assert last.load()["step"] == list(run.metrics["step"])[-1] >= 5
    assert (len(run.checkpoints) == 1) == (how == "checks")


def test_run_that_does_not_leave_is_cancelled_when_the_grace_is_over(start: Any, tmp_path: Path) -> None:
    driver = start("silent")
    driver.interrupt()
    out, err = driver.ends()
    assert "interrupted, free: 2.0" in out and "within 0.5 s" in err
    (run_dir,) = tmp_path.glob("train_func_*/run_001")
    run = raysgd.load_run(run_dir)
    assert run.outcome == "cancelled" and run.checkpoints[-1].load()["step"] == 5


def test_ctrl_c_while_workers_start_ends_the_driver(start: Any, tmp_path: Path) -> None:
    driver = start("cold")
    assert not driver.workers(), "the workers train already"
    driver.interrupt()
    out, err = driver.ends()
    assert driver.process.returncode != 0
    assert "KeyboardInterrupt" in err and "stopping: the run saves" in err
    assert "interrupted, free: 2.0" in out, "resources were held until the driver's end"
    assert not driver.workers()
    (run_dir,) = tmp_path.glob("train_func_*/run_001")
    assert raysgd.load_run(run_dir).outcome == "stopped"


@pytest.mark.parametrize(
    ("how", "number"), [("stubborn", signal.SIGINT), ("collective", signal.SIGINT), ("stubborn", signal.SIGTERM)]
)
def test_second_signal_ends_the_driver_immediately(
    start: Any, tmp_path: Path, how: str, number: signal.Signals
) -> None:
    driver = start(how)
    driver.interrupt(number)
    assert until(lambda: "stops it at once" in driver.errors.read_text(), PATIENCE_S)
    assert driver.process.poll() is None and not (tmp_path / "raised").exists(), "the driver waits for the workers"
    driver.interrupt(number)
    assert until((tmp_path / "raised").exists, 20), "the driver waited for the workers, which take 30 s"
    driver.ends()
