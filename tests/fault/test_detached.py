"""A detached Trainer: other drivers attach to it, read its run from the beginning, pause it and resume it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray

import raysgd
from raysgd.errors import ConfigError, RunCancelledError, UsageError, WorkerError
from raysgd.testing import check_history
from support.cluster import ClusterState
from support.poll import until
from support.runs import PATIENCE_S, actor_pids, are_gone, controller_pid, travels_by_value

pytestmark = pytest.mark.fault
travels_by_value(__name__)

NUM_ROWS = 30_000
#: A user's program. Its arguments: storage path, name, the file that training waits for, what it does with the Trainer.
PROGRAM = """
    import os, sys, time
    import numpy as np
    import ray
    import raysgd

    def train_func(config):
        state = raysgd.load_checkpoint()
        step = 0 if state is None else state["step"] + 1
        while not raysgd.broadcast(os.path.exists(config["file"])):
            raysgd.report(step=step)
            raysgd.save_checkpoint({"step": step})
            step += 1
            time.sleep(0.02)
        batches = raysgd.get_dataset().get_split().iter_batches(batch_size=1000)
        return step, sum(len(batch["x"]) for batch in batches)

    class Logger(raysgd.Callback):
        def __init__(self, file):
            self.file = file

        def on_result(self, result):
            with open(self.file, "a") as file:
                file.write(f"{result['step']} {os.getpid()}\\n")

    storage, name, file, what = sys.argv[1:]
    ray.init(address="auto", log_to_driver=False)
    run = raysgd.RunConfig(name=name, storage_path=storage, detached=what != "is not")
    Logger.runs_in = "controller" if what == "is not" else "driver"
    trainer = raysgd.Trainer(2, backend="none", run_config=run)
    given = dict(config={"file": file}, dataset={"x": np.arange(%d)}, callbacks=[Logger(file + ".log")], returns="all")
    if what == "stays":
        print("began", flush=True)
        trainer.run(train_func, **given)
    elif what == "leaves":
        with trainer:
            next(trainer.run_generator(train_func, **given))
        print("left", flush=True)
    else:
        stream = trainer.run_generator(train_func, **given)
        for _ in range(5):
            next(stream)
        print("began", flush=True)
        time.sleep(1000)
"""


class Program:
    """A driver in its own process, on the cluster of the tests.

    Args:
        what: What the driver does after the run began: it waits to be killed (``"waits"``; ``"is not"``: with a Trainer
            that is not detached), waits for the run (``"stays"``), or leaves the ``with`` block of the Trainer (``"leaves"``).
    """

    begun: ClassVar[list[Program]] = []

    def __init__(self, folder: Path, name: str, address: str, what: str = "waits") -> None:
        self.begun.append(self)
        self.go = folder / "go"
        self.log = folder / "go.log"
        script = folder / "program.py"
        script.write_text(textwrap.dedent(PROGRAM) % NUM_ROWS)
        arguments = [str(folder / "runs"), name, str(self.go), what]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = ""
        for line in self.process.stdout:
            self.output += line
            if line.strip() in ("began", "left"):
                return
        raise AssertionError(f"the program ended:\\n{self.output}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> str:
        """Wait for the driver to end, and return the rest of its output."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return str(out)


@pytest.fixture
def cluster(ray_cluster: dict[str, Any]) -> Iterator[str]:
    """Yield the address of the cluster, and check that nothing is left in it."""
    before = ClusterState.now()
    yield str(ray_cluster["address"])
    for program in Program.begun:
        program.kill()
    Program.begun.clear()
    assert before.leftovers() == []


def attach_after_driver_death(folder: Path, name: str, address: str) -> tuple[Program, raysgd.Trainer]:
    """Start a run in a driver, kill the driver, and attach to its Trainer."""
    program = Program(folder, name, address)
    program.kill()
    return program, raysgd.Trainer.attach(name)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0))


def test_detached_run_outlives_its_driver_and_is_read_from_the_beginning(cluster: str, tmp_path: Path) -> None:
    all_cpus = free_cpus()
    program, trainer = attach_after_driver_death(tmp_path, "alone", cluster)
    first = trainer.status()
    assert (first.state, first.world_size, first.num_failures) == ("running", 2, 0)
    assert until(lambda: trainer.status().iteration > first.iteration + 10, PATIENCE_S), "the run does not continue"

    stream, tail = trainer.stream(), trainer.stream(from_iteration=8)
    results = [next(stream) for _ in range(15)]
    assert [result["training_iteration"] for result in results] == list(range(1, 16))
    assert next(tail)["training_iteration"] == 8
    program.go.touch()
    results += stream
    returned = stream.get_returns()
    assert sum(rows for _, rows in returned) == NUM_ROWS, "the data was the driver's"
    assert [result["step"] for result in results] == list(range(returned[0][0]))
    check_history(str(stream.run_dir))

    logged = [line.split() for line in program.log.read_text().splitlines()]
    assert [int(step) for step, _ in logged] == list(range(returned[0][0]))
    assert {int(pid) for _, pid in logged}.isdisjoint({program.process.pid, os.getpid()})
    assert until(lambda: free_cpus() == all_cpus, PATIENCE_S), "its workers are held when it is over"
    again = raysgd.Trainer.attach("alone")
    last = again.get_last_checkpoint()
    assert last is not None and last.load()["step"] == returned[0][0] - 1
    assert again.run_dir == stream.run_dir
    assert (again.status().state, again.status().iteration) == ("done", returned[0][0])
    assert again.stream().get_returns() == returned
    again.shutdown()
    with pytest.raises(UsageError, match="no detached Trainer 'alone' is in this cluster"):
        raysgd.Trainer.attach("alone")


def test_detached_run_resumes_after_controller_death(cluster: str, tmp_path: Path) -> None:
    program, trainer = attach_after_driver_death(tmp_path, "twice", cluster)
    stream = trainer.stream()
    next(stream)
    os.kill(controller_pid(), signal.SIGKILL)
    assert next(result for result in stream if result["attempt"] == 2)
    program.go.touch()
    returned = stream.get_returns()
    assert sum(rows for _, rows in returned) == NUM_ROWS
    assert trainer.status().num_failures == 1
    check_history(str(stream.run_dir), max_failures=3)
    os.kill(controller_pid(), signal.SIGKILL)  # the run is over and stays over
    again = raysgd.Trainer.attach("twice")
    assert until(lambda: again.status().state == "done", PATIENCE_S)
    stream = again.stream()
    assert [result["step"] for result in stream][-1] == returned[0][0] - 1
    with pytest.raises(WorkerError, match="what train_func returned was lost with the controller's process"):
        stream.get_returns()
    again.shutdown()


def test_detached_run_is_paused_resumed_and_cancelled(cluster: str, tmp_path: Path) -> None:
    all_cpus = free_cpus()
    _, trainer = attach_after_driver_death(tmp_path, "rests", cluster)
    stream = trainer.stream()
    paused = trainer.pause()
    assert (paused.state, paused.world_size) == ("paused", 0)
    assert until(lambda: free_cpus() == all_cpus, PATIENCE_S)
    assert are_gone(actor_pids("WorkerActor"))

    os.kill(controller_pid(), signal.SIGKILL)  # the run stays paused
    assert until(lambda: trainer.status().state == "paused", PATIENCE_S)
    trainer.resume()
    assert until(lambda: trainer.status().iteration > paused.iteration + 5, PATIENCE_S)
    trainer.cancel()
    with pytest.raises(RunCancelledError):
        stream.get_returns()
    assert until(lambda: trainer.status().state == "cancelled", PATIENCE_S)
    run = raysgd.load_run(paused.run_dir)
    kinds = list(run.events["kind"])
    assert list(run.metrics["step"]) == list(range(len(run.metrics))), "a step was done twice, or not at all"
    assert kinds.count("paused") == kinds.count("resumed") == 1 and "failure" not in kinds
    check_history(paused.run_dir)
    trainer.shutdown()


def test_name_is_refused_while_its_run_is_live(cluster: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = Program(tmp_path, "taken", cluster, "leaves")
    assert program.process.wait(PATIENCE_S) == 0, program.end()
    run = raysgd.RunConfig(name="taken", storage_path=tmp_path / "runs", detached=True)
    with pytest.raises(ConfigError, match="'taken' is in this cluster already, and its run is running"):
        raysgd.Trainer(1, backend="none", run_config=run).run(one)
    assert "this program started the Ray cluster" in caplog.text
    assert "started the Ray cluster" not in program.output
    trainer = raysgd.Trainer.attach("taken")
    with pytest.raises(raysgd.errors.TrainerBusyError):
        trainer.run(one)
    program.go.touch()
    assert trainer.stream().get_returns()[0][0] > 0
    with raysgd.Trainer(1, backend="none", run_config=run) as other:  # the name of a finished run is free again
        assert other.run(one) == 1
        assert Path(str(other.run_dir)).name == "run_002"
        assert raysgd.Trainer.attach("taken").run(one) == 1, "every attached driver may start a run"
    with pytest.raises(UsageError, match="no detached Trainer 'taken'"):
        raysgd.Trainer.attach("taken")


def one() -> int:
    return 1


def test_ctrl_c_detaches_the_driver(cluster: str, tmp_path: Path) -> None:
    program = Program(tmp_path, "watched", cluster, "stays")
    assert until(lambda: _state("watched") == "running", PATIENCE_S)
    program.process.send_signal(signal.SIGINT)
    output = program.end()
    assert program.process.returncode != 0 and "KeyboardInterrupt" in output
    assert "the detached run continues; Trainer.attach('watched') attaches to it" in output
    trainer = raysgd.Trainer.attach("watched")
    status = trainer.status()
    assert status.state == "running"
    trainer.shutdown()
    assert raysgd.load_run(status.run_dir).outcome == "cancelled"


def _state(name: str) -> str:
    try:
        return raysgd.Trainer.attach(name).status().state
    except UsageError:
        return "nothing"


def test_nothing_of_an_attached_run_outlives_its_driver(cluster: str, tmp_path: Path) -> None:
    program = Program(tmp_path, "attached", cluster, "is not")
    kinds = {"TrainerActor": 1, "CallbackHost": 1, "WorkerActor": 2}
    assert until(lambda: all(len(actor_pids(kind)) == count for kind, count in kinds.items()), PATIENCE_S)
    processes = [pid for kind in kinds for pid in actor_pids(kind)]
    program.kill()
    assert are_gone(processes)
    assert _state("attached") == "nothing"


@pytest.mark.parametrize("name", ["", "a/b", "..", None])
def test_invalid_names_are_refused(ray_cluster: Any, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"Trainer.attach\(name\)"):
        raysgd.Trainer.attach(name)


@pytest.mark.parametrize("method", ["stream", "pause", "resume", "cancel"])
def test_attach_without_a_run_raises(ray_cluster: Any, tmp_path: Path, method: str) -> None:
    trainer = raysgd.Trainer(1, backend="none", run_config=raysgd.RunConfig(storage_path=tmp_path))
    assert trainer.status() == raysgd.RunStatus()
    with pytest.raises(UsageError, match=rf"{method}\(\) needs a run, and this Trainer has had none"):
        getattr(trainer, method)()
