"""The controller and the callback host are killed: the run resumes, or raises the reason."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raysgd
from raysgd.controller.watchdog import ask
from raysgd.errors import WorkerDiedError, WorkerError
from raysgd.testing import check_history
from raysgd.workers.placement.cluster import NAMESPACE
from support.cluster import ClusterState
from support.poll import until
from support.runs import (
    PATIENCE_S,
    HostLog,
    actor_pids,
    are_gone,
    controller_pid,
    events_of,
    latest_run,
    make_trainer,
    pids,
    quiet,
    travels_by_value,
)

pytestmark = pytest.mark.fault
travels_by_value(__name__)


def run_until_file_exists(config: dict[str, Any]) -> str:
    step = 0
    while not os.path.exists(config["file"]):
        raysgd.report(step=step)
        step += 1
        time.sleep(0.01)
    return "went"


def test_training_continues_after_callback_host_death(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs") as trainer:
        log = tmp_path / "log"
        config = {"file": str(tmp_path / "go")}
        stream = trainer.run_generator(run_until_file_exists, config, callbacks=[*quiet(), HostLog(log)])
        assert until(lambda: log.exists() and log.read_text().endswith("]\n"), PATIENCE_S)
        killed = json.loads(log.read_text().splitlines()[0])[1]
        os.kill(killed, signal.SIGKILL)
        assert are_gone([killed])
        (tmp_path / "go").write_text("")
        assert stream.get_returns() == "went", "training does not depend on the callback host"
        messages = [warning["message"] for warning in events_of(trainer, "warning")]
        assert any("the process of the controller's callbacks is gone" in message for message in messages)

        log.unlink()
        assert (
            trainer.run(run_until_file_exists, {"file": str(tmp_path / "go")}, callbacks=[*quiet(), HostLog(log)])
            == "went"
        )
        assert trainer.run(report_once, callbacks=[*quiet(), HostLog(log)]) is None
        assert json.loads(log.read_text().splitlines()[-1])[1] != killed


def report_once() -> None:
    raysgd.report(step=0)


def saving_loop(config: dict[str, Any]) -> tuple[int, int]:
    """Save and report until a file exists; return the last step and the number of rows."""
    state = raysgd.load_checkpoint()
    step = 0 if state is None else state["step"] + 1
    while not raysgd.broadcast(os.path.exists(config["file"])):  # all ranks stop at the same step
        raysgd.report(step=step, **({"first": 1} if step == 0 else {}))
        raysgd.save_checkpoint({"step": step})
        step += 1
        time.sleep(0.01)
    batches = raysgd.get_dataset().get_split().iter_batches(batch_size=1000) if config.get("has_data") else ()
    return step, sum(len(batch["x"]) for batch in batches)


def kill_controller() -> None:
    pid = controller_pid()
    os.kill(pid, signal.SIGKILL)
    assert are_gone([pid])


def next_of_attempt(stream: raysgd.ResultStream, attempt: int) -> raysgd.Result:
    return next(result for result in stream if result["attempt"] == attempt)


def check_steps(results: list[raysgd.Result]) -> None:
    """Check that each step is one iteration, and that iterations repeat only after a failure."""
    assert all(result["step"] == result["training_iteration"] - 1 for result in results)
    for before, after in itertools.pairwise(results):
        follows = after["training_iteration"] == before["training_iteration"] + 1
        assert follows or after["attempt"] > before["attempt"]


@pytest.mark.timeout(300)  # several cold starts: two minutes on a loaded machine
def test_run_resumes_after_controller_death(ray_cluster: Any, tmp_path: Path) -> None:
    before = ClusterState.now()
    log = tmp_path / "log"
    config = {"file": str(tmp_path / "go"), "has_data": True}
    with make_trainer(tmp_path / "runs", failure_config=raysgd.FailureConfig(max_failures=2)) as other:
        processes = pids(other)
        data = {"x": np.arange(50_000.0)}  # put by the driver into the object store
        callbacks = [*quiet(), HostLog(log)]
        reduce = {"first": "sum"}  # reported before the deaths alone, so it has to be found in the journal
        stream = other.run_generator(
            saving_loop, config, dataset=data, callbacks=callbacks, reduce=reduce, returns="all"
        )
        results = [next(stream) for _ in range(20)]
        kill_controller()
        assert are_gone(processes)
        results.append(next_of_attempt(stream, 2))
        kill_controller()
        results.append(next_of_attempt(stream, 3))
        (tmp_path / "go").touch()
        results += stream
        returned = stream.get_returns()
        assert sum(rows for _, rows in returned) == 50_000
        assert stream.is_finished() and {result["attempt"] for result in results} == {1, 2, 3}
        run = latest_run(other)
        assert run.outcome == "done"
        assert list(run.metrics["step"]) == list(range(returned[0][0]))
        check_history(str(stream.run_dir), max_failures=2)
        assert [data["action"] for data in events_of(other, "failure")] == ["retry 1", "retry 2"]
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        assert len({pid for _, pid in logged}) == 1, "the callbacks' process lives on"
        assert set(range(returned[0][0])) <= {step for step, _ in logged}
        warm = pids(other)
        assert len(warm) == 2 and not set(warm) & set(processes)
        assert other.run(saving_loop, config | {"has_data": False}, callbacks=quiet()) == (0, 0)
    assert are_gone(warm)
    assert before.leftovers() == []


def test_results_arrive_in_order_whenever_the_controller_dies(ray_cluster: Any, tmp_path: Path) -> None:
    config = {"file": str(tmp_path / "go")}
    with make_trainer(tmp_path / "runs") as other:
        stream = other.run_generator(saving_loop, config, callbacks=quiet())
        results = [next(stream)]
        kill_controller()  # reports of the first milliseconds are in no file yet
        results.append(next_of_attempt(stream, 2))
        results += [next(stream) for _ in range(20)]
        (tmp_path / "go").touch()
        results += stream
    check_steps(results)


class KillsAndWaits(raysgd.Callback):
    """Kills the controller, and blocks the reader in the driver until a new controller answers."""

    def __init__(self) -> None:
        self.is_done = False

    def on_result(self, result: raysgd.Result) -> None:
        if not self.is_done and result["step"] >= 10:
            self.is_done = True
            kill_controller()
            assert until(lambda: len(actor_pids("TrainerActor")) == 1, PATIENCE_S)
            names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
            (name,) = [name for name in names if "-worker-" not in name]
            ask(ray.get_actor(name, namespace=NAMESPACE), "endpoint")


def test_late_reader_continues_after_controller_death(ray_cluster: Any, tmp_path: Path) -> None:
    config = {"file": str(tmp_path / "go")}
    with make_trainer(tmp_path / "runs") as other:
        stream = other.run_generator(saving_loop, config, callbacks=[*quiet(), KillsAndWaits()])
        results = [next_of_attempt(stream, 2)]
        (tmp_path / "go").touch()
        results += stream
        assert stream.get_returns()[0] == results[-1]["step"] + 1
    check_steps(results)


def test_controller_death_with_max_failures_0_raises(ray_cluster: Any, tmp_path: Path) -> None:
    config = {"file": str(tmp_path / "never")}
    with make_trainer(tmp_path / "runs", failure_config=raysgd.FailureConfig(max_failures=0)) as other:
        stream = other.run_generator(saving_loop, config, callbacks=quiet())
        for _ in range(10):
            next(stream)
        assert until(lambda: list(Path(str(stream.run_dir)).glob("checkpoints/*/manifest.json")), PATIENCE_S)
        kill_controller()
        with pytest.raises(WorkerDiedError, match="the controller's process died, and all workers with it") as caught:
            stream.get_returns()
        assert caught.value.failures == 1
        last = other.get_last_checkpoint()
        assert last is not None and str(last.path) in str(caught.value)
        (tmp_path / "never").touch()
        assert other.run(saving_loop, config, resume_from=last, callbacks=quiet())[0] == last.load()["step"] + 1


def test_controller_dies_between_two_runs(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    config = {"file": str(tmp_path / "go")}
    with make_trainer(tmp_path / "runs") as other:
        assert other.run(saving_loop, config, callbacks=quiet()) == (0, 0)
        first = other.run_dir
        kill_controller()
        assert other.run(saving_loop, config, callbacks=quiet()) == (0, 0)
        assert (Path(str(first)).name, Path(str(other.run_dir)).name) == ("run_001", "run_002")


def test_class_api_instances_are_lost_with_the_controller(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs") as other:
        other.start(dict, a=1)
        kill_controller()
        with pytest.raises(WorkerError, match="the Trainer's controller process is gone"):
            other.execute(len)
        other.start(dict, a=1, b=2)
        assert other.execute(len) == [2, 2]
