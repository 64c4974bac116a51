"""raysgd's own processes are killed, stopped by SIGSTOP, or hang: the run continues without them, or says what was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raysgd
from raysgd.errors import WorkerError
from raysgd.testing import FaultPlan, KillProcess, StopProcess, check_history
from support.cluster import ClusterState
from support.drivers import leave_detached_run
from support.poll import until
from support.runs import (
    PATIENCE_S,
    HostLog,
    actor_pids,
    are_gone,
    controller_pid,
    events_of,
    make_trainer,
    pids,
    quiet,
    travels_by_value,
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
travels_by_value(__name__)

HEARTBEAT_S = 3.0
FAILURE = raysgd.FailureConfig(heartbeat_timeout_s=HEARTBEAT_S, callback_timeout_s=4 * HEARTBEAT_S, max_failures=3)


class SlowThenHangs(HostLog):
    """Is slow at one result, for longer than a heartbeat may take, and never returns from the end of the run."""

    def on_result(self, result: raysgd.Result) -> None:
        if result["step"] == 2:
            time.sleep(2 * HEARTBEAT_S)
        super().on_result(result)

    def on_run_end(self, error: BaseException | None) -> None:
        wait_for_a_server()


def wait_for_a_server() -> None:
    time.sleep(10_000)


def saving_loop(config: dict[str, Any]) -> int:
    """Save and report until a file exists, and at least ``steps`` times; return the number of steps."""
    state = raysgd.load_checkpoint()
    step = 0 if state is None else state["step"] + 1
    while step < config.get("steps", 0) or not raysgd.broadcast(os.path.exists(config["file"])):
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step})
        step += 1
        time.sleep(0.02)
    return step


def lines(log: Path) -> list[list[int]]:
    """Return the complete lines of a log: steps and process ids."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def messages(trainer: raysgd.Trainer) -> list[str]:
    return [warning["message"] for warning in events_of(trainer, "warning")]


def test_stopped_callback_host_is_replaced_and_its_callbacks_get_the_whole_run(
    ray_cluster: Any, tmp_path: Path
) -> None:
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        log, config = tmp_path / "log", {"file": str(tmp_path / "go")}
        stream = trainer.run_generator(saving_loop, config, callbacks=[*quiet(), HostLog(log)])
        assert until(lambda: len(lines(log)) > 3, PATIENCE_S)
        stopped = lines(log)[0][1]
        os.kill(stopped, signal.SIGSTOP)
        assert are_gone([stopped], PATIENCE_S)
        assert until(lambda: lines(log)[-1][1] != stopped, PATIENCE_S), "it was not started again"
        second = lines(log)[-1][1]
        (tmp_path / "go").touch()
        os.kill(second, signal.SIGSTOP)  # the run ends meanwhile
        num_steps = stream.get_returns()
        (*_, third) = {pid for _, pid in lines(log)} - {stopped, second}
        assert [step for step, pid in lines(log) if pid == third] == list(range(num_steps))
        found = [message for message in messages(trainer) if "the process of the controller's callbacks" in message]
        assert len(found) == 2
        assert "it was stopped (SIGSTOP), and was killed. It is started again" in found[0]
        assert events_of(trainer, "failure") == [], "training does not depend on the callbacks"


def test_callback_that_does_not_end_is_named_and_the_run_ends(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        log = tmp_path / "log"
        (tmp_path / "go").touch()
        config = {"file": str(tmp_path / "go"), "steps": 10}
        pids(trainer)
        begun = time.monotonic()
        assert trainer.run(saving_loop, config, callbacks=[*quiet(), SlowThenHangs(log)]) == 10
        assert time.monotonic() - begun < 2 * PATIENCE_S
        assert len({pid for _, pid in lines(log)}) == 1, "a slow callback is not killed during the run"
        assert [step for step, _ in lines(log)] == list(range(10))
        (message,) = [message for message in messages(trainer) if "SlowThenHangs" in message]
        assert "SlowThenHangs.on_run_end" in message and "wait_for_a_server" in message
        assert "callback_timeout_s" in message
        assert are_gone([lines(log)[0][1]])
        check_history(str(trainer.run_dir))
        assert trainer.run(saving_loop, config, callbacks=[*quiet(), HostLog(log)]) == 10


def test_stopped_controller_is_killed_and_the_run_resumes(
    ray_cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        config = {"file": str(tmp_path / "go")}
        data = {"x": np.arange(100)}
        stream = trainer.run_generator(
            saving_loop, config, dataset=data, callbacks=[*quiet(), HostLog(tmp_path / "log")]
        )
        results = [next(stream) for _ in range(20)]
        stopped = controller_pid()
        os.kill(stopped, signal.SIGSTOP)
        assert trainer.status().state  # a call waits for its answer meanwhile
        results.append(next(result for result in stream if result["attempt"] == 2))
        assert are_gone([stopped])
        (tmp_path / "go").touch()
        results += stream
        assert stream.get_returns() == results[-1]["step"] + 1
        (failure,) = events_of(trainer, "failure")
        assert "the controller's process died" in failure["error"]
        check_history(str(trainer.run_dir), max_failures=3)
        (line,) = [record.message for record in caplog.records if "controller process" in record.message]
        assert "it was stopped (SIGSTOP). It is killed and starts again" in line


@pytest.mark.parametrize("has_run", [True, False])
def test_shutdown_ends_despite_a_stopped_controller(ray_cluster: Any, tmp_path: Path, has_run: bool) -> None:
    before = ClusterState.now()
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        processes = [*pids(trainer), controller_pid()]
        if has_run:
            next(trainer.run_generator(saving_loop, {"file": str(tmp_path / "never")}, callbacks=quiet()))
        os.kill(controller_pid(), signal.SIGSTOP)
        begun = time.monotonic()
    assert time.monotonic() - begun < PATIENCE_S
    assert are_gone(processes)
    assert before.leftovers() == []


def test_controller_stopped_for_less_than_the_timeout_continues(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        stream = trainer.run_generator(saving_loop, {"file": str(tmp_path / "go")}, callbacks=quiet())
        results = [next(stream) for _ in range(10)]
        pid = controller_pid()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.35 * HEARTBEAT_S)
        os.kill(pid, signal.SIGCONT)
        results += [next(stream) for _ in range(20)]
        (tmp_path / "go").touch()
        results += stream
        assert controller_pid() == pid and {result["attempt"] for result in results} == {1}
        assert events_of(trainer, "hang") == []


def test_stopped_controller_of_a_detached_run_is_killed_without_a_driver(ray_cluster: Any, tmp_path: Path) -> None:
    before = ClusterState.now()
    go = leave_detached_run(tmp_path, "alone", ray_cluster["address"], HEARTBEAT_S)
    stopped = controller_pid()
    os.kill(stopped, signal.SIGSTOP)
    assert are_gone([stopped], PATIENCE_S), "nobody watches it"
    trainer = raysgd.Trainer.attach("alone")
    assert until(lambda: trainer.status().state == "running", PATIENCE_S)
    stream = trainer.stream()
    results = []
    for result in stream:
        results.append(result)
        if result["attempt"] == 2:  # not before: that attempt might end without a report
            go.touch()
    assert {result["attempt"] for result in results} == {1, 2}
    assert stream.get_returns() == results[-1]["step"] + 1
    check_history(str(stream.run_dir))
    trainer.shutdown()
    assert before.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_guard_is_replaced_and_kills_the_stopped_controller_of_a_paused_run(
    ray_cluster: Any, tmp_path: Path, number: int
) -> None:
    before = ClusterState.now()
    go = leave_detached_run(tmp_path, "paused", ray_cluster["address"], HEARTBEAT_S)
    trainer = raysgd.Trainer.attach("paused")
    trainer.pause()
    assert until(lambda: actor_pids("ControllerGuard"), PATIENCE_S)
    (guard,) = actor_pids("ControllerGuard")
    os.kill(guard, number)
    assert are_gone([guard], PATIENCE_S), "nobody watches it"
    assert until(lambda: actor_pids("ControllerGuard"), PATIENCE_S), "it was not started again"
    stopped = controller_pid()
    os.kill(stopped, signal.SIGSTOP)  # this driver waits for nothing
    assert are_gone([stopped], PATIENCE_S), "nobody watches it"
    assert until(lambda: trainer.status().state == "paused", PATIENCE_S)
    go.touch()
    trainer.resume()
    stream = trainer.stream()
    assert [result["step"] for result in stream] == list(range(stream.get_returns()))
    check_history(str(stream.run_dir))
    trainer.shutdown()
    assert before.leftovers() == []


def run_in_a_placement_group(storage: str) -> None:
    """Train in the room of this process, with one worker more than it has room for."""
    with make_trainer(Path(storage), (1, 2), failure_config=FAILURE) as trainer:
        trainer.run(saving_loop, {"file": str(Path(storage, "never"))}, callbacks=quiet())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_placement_guard_is_replaced_and_removes_the_groups_of_a_dead_driver(
    ray_cluster: Any, tmp_path: Path, number: int
) -> None:
    before = ClusterState.now()
    room = ray.util.placement_group([{"CPU": 1}] * 2)
    there = PlacementGroupSchedulingStrategy(room, 0, placement_group_capture_child_tasks=True)
    driver = ray.remote(max_retries=0)(run_in_a_placement_group).options(scheduling_strategy=there)
    done = driver.remote(str(tmp_path))
    try:
        assert until(lambda: len(actor_pids("WorkerActor")) == 2 and actor_pids("PlacementGuard"), PATIENCE_S)
        (guard,) = actor_pids("PlacementGuard")
        os.kill(guard, number)
        assert are_gone([guard], PATIENCE_S), "nobody watches it"
        assert until(lambda: actor_pids("PlacementGuard"), PATIENCE_S), "it was not started again"
    finally:
        ray.cancel(done, force=True)
        ray.util.remove_placement_group(room)
    assert before.leftovers() == []


#: A driver that writes a line for each result. Its arguments: storage path, the file that training waits for.
READER = """
    import os, sys, time
    import ray
    import raysgd

    def train_func(config):
        step = 0
        while not raysgd.broadcast(os.path.exists(config["file"])):
            raysgd.report(step=step)
            raysgd.save_checkpoint({"step": step})
            step += 1
            time.sleep(0.02)

    storage, file = sys.argv[1:]
    ray.init(address="auto", log_to_driver=False)
    failure = raysgd.FailureConfig(heartbeat_timeout_s=3)
    run = raysgd.RunConfig(name="read", storage_path=storage)
    with raysgd.Trainer(1, backend="none", run_config=run, failure_config=failure) as trainer:
        silent = raysgd.callbacks.ProgressCallback(mode="off")  # its lines, of another thread, could come into one of ours
        for result in trainer.run_generator(train_func, {"file": file}, callbacks=[silent]):
            print(result["step"], flush=True)
"""


def test_run_continues_while_its_driver_is_stopped(ray_cluster: Any, tmp_path: Path) -> None:
    script, go = tmp_path / "reader.py", tmp_path / "go"
    script.write_text(textwrap.dedent(READER))
    command = [sys.executable, str(script), str(tmp_path / "runs"), str(go)]
    env = {**os.environ, "RAY_ADDRESS": str(ray_cluster["address"])}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        first = driver.stdout.readline()
        driver.send_signal(signal.SIGSTOP)
        time.sleep(2 * HEARTBEAT_S)
        reached = newest_checkpoint(tmp_path)
        assert until(lambda: newest_checkpoint(tmp_path) > reached, PATIENCE_S, interval_s=0.5), "it waits"
        driver.send_signal(signal.SIGCONT)
        go.touch()
        steps = [int(line) for line in (first, *driver.stdout) if line.strip().isdigit()]
    assert driver.returncode == 0
    assert steps == list(range(len(steps))) and len(steps) > reached
    (run_dir,) = tmp_path.glob("runs/read/run_*")
    check_history(str(run_dir), max_failures=0)


def newest_checkpoint(folder: Path) -> int:
    """Return the number of the newest checkpoint of the run below ``folder``; 0 if there is none."""
    return max(
        [int(path.parent.name.split("_")[-1]) for path in folder.glob("runs/*/*/checkpoints/*/manifest.json")],
        default=0,
    )


def test_workers_that_are_stopped_between_runs_are_replaced(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        before = pids(trainer)
        os.kill(before[1], signal.SIGSTOP)
        after = pids(trainer)
        assert after[0] == before[0] and after[1] != before[1]
        assert any("is killed and replaced" in message for message in messages(trainer))
        (failure,) = events_of(trainer, "failure")
        assert "died while it was starting" in failure["error"]


def trains_on_all_rows(config: dict[str, Any]) -> int:
    """Read the rows, then save and report until a file exists; return the sum of the rows."""
    total = sum(
        int(batch["x"].sum()) for batch in raysgd.get_dataset().get_split(whole=True).iter_batches(batch_size=8)
    )
    saving_loop({**config, "steps": 5})
    return total


@pytest.mark.parametrize("fault", [KillProcess, StopProcess], ids=["killed", "stopped"])
def test_rows_that_were_read_are_not_missed_without_the_data_holder(
    ray_cluster: Any, tmp_path: Path, fault: type[KillProcess]
) -> None:
    run = raysgd.RunConfig(storage_path=tmp_path / "runs", name="held", detached=True)
    plan = FaultPlan([fault(process="data holder", step=2)])
    trainer = raysgd.Trainer(2, "none", run_config=run, failure_config=FAILURE)
    try:
        config, data = {"file": str(tmp_path / "go")}, {"x": np.arange(64)}
        stream = trainer.run_generator(plan.wrap(trains_on_all_rows), config, dataset=data, callbacks=quiet())
        assert next(stream)["step"] == 0
        assert until(lambda: not actor_pids("DataHolder"), PATIENCE_S), "nobody watches it"
        (tmp_path / "go").touch()
        assert stream.get_returns() == sum(range(64))
        plan.assert_all_fired()
        if fault is StopProcess:
            (warning,) = [text for text in messages(trainer) if "the process that holds the run's data" in text]
            assert "it was stopped (SIGSTOP). It is killed" in warning
        assert events_of(trainer, "failure") == []
    finally:
        trainer.shutdown()


def test_readers_get_an_error_when_data_holder_and_controller_die(
    ray_cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = ClusterState.now()
    run = raysgd.RunConfig(storage_path=tmp_path / "runs", name="lost", detached=True)
    trainer = raysgd.Trainer(1, "none", run_config=run, failure_config=FAILURE)
    config, data = {"file": str(tmp_path / "never")}, {"x": np.arange(64)}
    stream = trainer.run_generator(trains_on_all_rows, config, dataset=data, callbacks=quiet())
    next(stream)
    for pid in (*actor_pids("DataHolder"), controller_pid()):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="the process that has the run's data is gone"):
        stream.get_returns()
    trainer.shutdown()
    assert before.leftovers() == []
    assert "InvalidStateError" not in caplog.text


@pytest.mark.parametrize("fault", [KillProcess, StopProcess], ids=["killed", "stopped"])
def test_plan_breaks_the_callback_host_and_the_controller(
    ray_cluster: Any, tmp_path: Path, fault: type[KillProcess]
) -> None:
    plan = FaultPlan([fault(process="callback host", step=3), fault(rank=1, step=20)])
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        (tmp_path / "go").touch()
        config = {"file": str(tmp_path / "go"), "steps": 30}
        assert trainer.run(plan.wrap(saving_loop), config, callbacks=[*quiet(), HostLog(tmp_path / "log")]) == 30
        plan.assert_all_fired()
        assert len(events_of(trainer, "failure")) == 1
        check_history(str(trainer.run_dir))
        assert set(range(30)) <= {step for step, _ in lines(tmp_path / "log")}
    assert until(lambda: not actor_pids("CallbackHost"), PATIENCE_S)
