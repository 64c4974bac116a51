"""raysgd's own processes are stopped by SIGSTOP, or hang: the run continues without them, or says what was lost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.testing import FaultPlan, StopProcess, check_history
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
        begun = time.monotonic()
        assert trainer.run(saving_loop, config, callbacks=[*quiet(), SlowThenHangs(log)]) == 10
        assert time.monotonic() - begun < PATIENCE_S
        assert len({pid for _, pid in lines(log)}) == 1, "a slow callback is not killed during the run"
        assert [step for step, _ in lines(log)] == list(range(10))
        (message,) = messages(trainer)
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
        time.sleep(0.6 * HEARTBEAT_S)
        os.kill(pid, signal.SIGCONT)
        results += [next(stream) for _ in range(20)]
        (tmp_path / "go").touch()
        results += stream
        assert controller_pid() == pid and {result["attempt"] for result in results} == {1}
        assert events_of(trainer, "hang") == []


def test_workers_kill_the_stopped_controller_of_a_detached_run(ray_cluster: Any, tmp_path: Path) -> None:
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


def test_stopped_data_holder_is_killed_and_rows_that_were_read_are_not_missed(ray_cluster: Any, tmp_path: Path) -> None:
    run = raysgd.RunConfig(storage_path=tmp_path / "runs", name="held", detached=True)
    plan = FaultPlan([StopProcess(process="data holder", step=2)])
    trainer = raysgd.Trainer(2, "none", run_config=run, failure_config=FAILURE)
    try:
        config, data = {"file": str(tmp_path / "go")}, {"x": np.arange(64)}
        stream = trainer.run_generator(plan.wrap(trains_on_all_rows), config, dataset=data, callbacks=quiet())
        assert next(stream)["step"] == 0
        (holder,) = actor_pids("DataHolder")
        assert are_gone([holder], PATIENCE_S), "nobody watches it"
        (tmp_path / "go").touch()
        assert stream.get_returns() == sum(range(64))
        plan.assert_all_fired()
        (warning,) = [text for text in messages(trainer) if "the process that holds the run's data" in text]
        assert "it was stopped (SIGSTOP). It is killed" in warning
        assert events_of(trainer, "failure") == []
    finally:
        trainer.shutdown()


def test_plan_stops_the_callback_host_and_the_controller(ray_cluster: Any, tmp_path: Path) -> None:
    plan = FaultPlan([StopProcess(process="callback host", step=3), StopProcess(rank=1, step=20)])
    with make_trainer(tmp_path / "runs", failure_config=FAILURE) as trainer:
        (tmp_path / "go").touch()
        config = {"file": str(tmp_path / "go"), "steps": 30}
        assert trainer.run(plan.wrap(saving_loop), config, callbacks=[*quiet(), HostLog(tmp_path / "log")]) == 30
        plan.assert_all_fired()
        assert len(events_of(trainer, "failure")) == 1
        check_history(str(trainer.run_dir))
        assert set(range(30)) <= {step for step, _ in lines(tmp_path / "log")}
    assert actor_pids("CallbackHost") == []
