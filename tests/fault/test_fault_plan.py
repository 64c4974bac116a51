"""Each kind of fault happens once in a real run, as planned, and the files of the run keep the guarantees of raysgd."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import CheckpointCorruptError, StorageError, TrainFuncError, WorkerDiedError
from raysgd.testing import (
    BitFlip,
    ClusterState,
    DiskFull,
    Exit,
    Fault,
    FaultPlan,
    Hang,
    HistoryError,
    Kill,
    KillDriver,
    KillTrainerActor,
    LeakError,
    OutOfMemory,
    Preempt,
    Raise,
    RemoveNode,
    Slow,
    Stop,
    StorageFault,
    TornWrite,
    check_cluster,
    check_history,
)
from support.runs import PATIENCE_S, are_gone, events_of, latest_run, make_trainer, pids, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

STEPS = 6


TRAINER = {
    "failure_config": raysgd.FailureConfig(
        heartbeat_timeout_s=2, progress_timeout_s=10, max_failures=2, abort_grace_s=20
    )
}


def saving_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Save and report; all ranks pass a barrier in each step and continue when its checkpoint is committed."""
    began = time.monotonic()
    state = raysgd.load_checkpoint()
    start = 0 if state is None else state["step"] + 1
    for step in range(start, STEPS):
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step, "text": "x" * 1000}, all_ranks=config.get("all_ranks", False))
        if config.get("waits", True):
            wait_for(step)
        raysgd.barrier()
    return {"start": start, "pid": os.getpid(), "took_s": time.monotonic() - began}


def wait_for(step: int) -> None:
    """Wait until the checkpoint of this step is committed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = raysgd.load_checkpoint()
        if state is not None and state["step"] >= step:
            return
        time.sleep(0.01)
    raise TimeoutError


def run(trainer: raysgd.Trainer, *faults: Fault, **config: Any) -> tuple[FaultPlan, list[dict[str, Any]]]:
    """Run with these faults, check that all fired, check the files, and return the plan and the return values."""
    plan = FaultPlan(faults)
    returned = trainer.run(plan.wrap(saving_loop), config, callbacks=quiet(), returns="all")
    plan.assert_all_fired()
    check(trainer)
    return plan, returned


def check(trainer: raysgd.Trainer) -> None:
    check_history(str(trainer.run_dir), within_s=PATIENCE_S)


def actions(trainer: raysgd.Trainer) -> list[str]:
    return [failure["action"] for failure in events_of(trainer, "failure")]


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "start"),
    [
        (Kill(rank=1, step=3), 2),
        (Exit(rank=0, step=3, code=7), 2),
        (Kill(rank=1, phase="start"), 0),
        (Kill(rank=1, phase="collective", step=3), 3),
        (Kill(rank=0, phase="save", checkpoint=3), 2),
        (Kill(rank=1, phase="committed", checkpoint=3), 3),
        (Kill(rank=1, phase="load", step=3), 2),
        (Kill(rank=0, phase="write", checkpoint=3), 2),
        (Kill(rank=0, phase="half_written", checkpoint=3), 2),
        (Kill(rank=0, phase="written", checkpoint=3), 2),
        (Stop(rank=1, step=3), 2),
        (Stop(rank=0, phase="half_written", checkpoint=3), 2),
        (Hang(rank=1, step=3, holds_lock=True), 2),
        (Hang(rank=1, phase="collective", step=3), 3),
    ],
    ids=repr,
)
def test_broken_process_is_replaced_and_training_continues(trainer: raysgd.Trainer, fault: Fault, start: int) -> None:
    before = pids(trainer)
    plan, returned = run(trainer, fault)
    (fired,) = plan.fired
    assert (fired.fault, fired.attempt, fired.pid) == (fault, 1, before[fault.rank])
    assert are_gone([fired.pid])
    assert returned[1 - fault.rank]["pid"] == before[1 - fault.rank], "the survivor was replaced"
    # A rank that is ahead may have saved in this step before the other rank failed.
    assert returned[0]["start"] == returned[1]["start"] and returned[0]["start"] in (start, start + 1)
    assert actions(trainer) == ["retry 1"]
    assert len(events_of(trainer, "hang")) == isinstance(fault, (Stop, Hang))
    assert list(latest_run(trainer).metrics["step"]) == list(range(STEPS))


def test_run_survives_two_faults_in_sequence(trainer: raysgd.Trainer) -> None:
    plan, _ = run(trainer, Kill(rank=0, step=2), Exit(rank=1, step=4))
    assert [fired.attempt for fired in plan.fired] == [1, 2]
    assert actions(trainer) == ["retry 1", "retry 2"]


def test_run_survives_random_faults(trainer: raysgd.Trainer) -> None:
    plan = FaultPlan.random(7, ranks=2, steps=STEPS, kinds=(Kill, Exit), count=2)
    trainer.run(plan.wrap(saving_loop), {}, callbacks=quiet())
    plan.assert_all_fired()
    check(trainer)
    assert 1 <= len(actions(trainer)) <= 2  # simultaneous deaths count as one failure


def test_preempted_rank_leaves_and_no_failure_is_counted(trainer: raysgd.Trainer) -> None:
    plan = FaultPlan([Preempt(rank=1, step=2)])
    pids_before = pids(trainer)
    trainer.run(plan.wrap(saving_loop), {}, callbacks=quiet())
    plan.assert_all_fired()
    check(trainer)
    assert actions(trainer) == [] and len(events_of(trainer, "preemption")) == 1
    assert are_gone([plan.fired[0].pid]) and pids_before[0] in pids(trainer)


def test_run_ends_after_max_failures(trainer: raysgd.Trainer) -> None:
    plan = FaultPlan([Kill(rank=1, step=step) for step in (1, 2, 3)])
    with pytest.raises(WorkerDiedError, match="failure 3 of the run"):
        trainer.run(plan.wrap(saving_loop), {}, callbacks=quiet())
    plan.assert_all_fired()
    check(trainer)
    assert actions(trainer) == ["retry 1", "retry 2", "give up"]


# -- faults in train_func ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Raise(rank=1, step=3, error=KeyError("mine")), KeyError),
        (Raise(rank=0, phase="save", checkpoint=2), RuntimeError),
        (Exit(rank=1, step=3, hard=False), TrainFuncError),
        (OutOfMemory(rank=1, step=2), MemoryError),
    ],
    ids=repr,
)
def test_user_exception_is_raised_and_not_retried(
    trainer: raysgd.Trainer, fault: Fault, error: type[Exception]
) -> None:
    before = pids(trainer)
    plan = FaultPlan([fault])
    with pytest.raises(error) as caught:
        trainer.run(plan.wrap(saving_loop), {}, callbacks=quiet())
    assert caught.value.__cause__.rank == fault.rank  # type: ignore[union-attr]
    plan.assert_all_fired()
    check(trainer)
    assert actions(trainer) == [] and pids(trainer) == before


def test_allocated_memory_is_held_until_the_attempt_ends(trainer: raysgd.Trainer) -> None:
    def resident(config: dict[str, Any]) -> int:
        import psutil

        before = psutil.Process().memory_info().rss
        raysgd.report(step=0)
        return int(psutil.Process().memory_info().rss - before)

    plan = FaultPlan([OutOfMemory(rank=0, step=1, num_bytes=200_000_000)])
    taken = trainer.run(plan.wrap(resident), {}, callbacks=quiet(), returns="all")
    plan.assert_all_fired()
    assert taken[0] > 150_000_000 > taken[1]
    assert trainer.run(plan.wrap(resident), {}, callbacks=quiet()) < 150_000_000


def test_slow_fault_delays_all_ranks(trainer: raysgd.Trainer) -> None:
    _, (slow, fast) = run(trainer, Slow(rank=0, step=2, delay_s=0.5, steps=3))
    assert slow["took_s"] >= 1.5
    assert actions(trainer) == []
    assert fast["took_s"] >= 1.5, "they wait for each other"


# -- storage -----------------------------------------------------------------------------------------------------------


def test_full_disk_ends_the_run_with_the_os_message(trainer: raysgd.Trainer) -> None:
    plan = FaultPlan([DiskFull(rank=0, checkpoint=3)])
    with pytest.raises(StorageError, match=r"checkpoint 3 could not be written.*No space left on device"):
        trainer.run(plan.wrap(saving_loop), {}, callbacks=quiet())
    plan.assert_all_fired()
    check(trainer)
    kept = [checkpoint.load()["step"] for checkpoint in latest_run(trainer).checkpoints]
    assert kept in ([0, 1], [0, 1, 2])  # a copy in memory is stored again at the end


def test_full_disk_is_only_a_warning_with_on_write_error_warn(ray_cluster: Any, tmp_path: Path) -> None:
    warn = raysgd.CheckpointConfig(on_write_error="warn")
    with make_trainer(tmp_path, checkpoint_config=warn) as trainer:
        run(trainer, DiskFull(rank=0, checkpoint=2, times=2), waits=False)
        warned = [warning["message"] for warning in events_of(trainer, "warning")]
        assert len([text for text in warned if "could not be written" in text]) == 2
        assert [checkpoint.load()["step"] for checkpoint in latest_run(trainer).checkpoints] == [0, 3, 4, 5]


def test_files_of_other_ranks_are_deleted_after_a_full_disk(ray_cluster: Any, tmp_path: Path) -> None:
    warn = raysgd.CheckpointConfig(on_write_error="warn")
    with make_trainer(tmp_path, checkpoint_config=warn) as trainer:
        run(trainer, DiskFull(rank=0, checkpoint=2), waits=False, all_ranks=True)


def test_failed_write_is_tried_again(trainer: raysgd.Trainer) -> None:
    run(trainer, StorageFault(rank=0, checkpoint=2, times=2))


def test_unavailable_storage_is_waited_for(trainer: raysgd.Trainer) -> None:
    run(trainer, StorageFault(rank=0, checkpoint=2, for_s=3), waits=False)
    assert actions(trainer) == []
    assert [checkpoint.load()["step"] for checkpoint in latest_run(trainer).checkpoints] == list(range(STEPS))
    assert len(latest_run(trainer).checkpoints) == STEPS


def test_slow_storage_is_waited_for_and_is_not_a_hang(ray_cluster: Any, tmp_path: Path) -> None:
    """Reports continue during a write; a rank two saves ahead waits longer than progress_timeout_s."""
    failure = raysgd.FailureConfig(progress_timeout_s=3, max_failures=0)
    with make_trainer(tmp_path, failure_config=failure) as trainer:
        plan = FaultPlan([Slow(rank=0, phase="write", delay_s=2, steps=4)])  # two checkpoints with two files each
        ahead = trainer.run(plan.wrap(saves_arrays), {}, callbacks=quiet())
        plan.assert_all_fired()
        check(trainer)
        assert actions(trainer) == []
        assert [checkpoint.load()["step"] for checkpoint in latest_run(trainer).checkpoints] == list(range(5))
        assert ahead[0] == 0, "training waited for the write of its first checkpoint"
        assert ahead[3] >= 1, "more than two were waiting"


def saves_arrays(config: dict[str, Any]) -> list[int]:
    """Return, for each save, how many earlier saves were on storage when it returned."""
    import numpy as np

    written = []
    for step in range(5):
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step, "weights": np.full(1000, step)})
        raysgd.barrier()
        latest = raysgd.load_checkpoint()
        written.append(0 if latest is None else latest["step"] + 1)
    return written


@pytest.mark.parametrize(
    "fault",
    [BitFlip(rank=1, checkpoint=2), TornWrite(checkpoint=2, phase="committed"), TornWrite(checkpoint=2)],
    ids=repr,
)
def test_damaged_checkpoint_is_detected_by_all_readers(trainer: raysgd.Trainer, fault: Fault) -> None:
    plan = FaultPlan([fault])
    trainer.run(plan.wrap(saving_loop_without_load), {}, callbacks=quiet())
    plan.assert_all_fired()
    loaded = latest_run(trainer)
    assert [checkpoint.load()["step"] for checkpoint in loaded.checkpoints[2:]] == [2, 3, 4, 5]
    with pytest.raises(CheckpointCorruptError):
        loaded.checkpoints[1].load()
    with pytest.raises(HistoryError, match="checkpoint 2 was committed, and cannot be loaded") as caught:
        check(trainer)
    assert len(caught.value.violations) == 1


def saving_loop_without_load(config: dict[str, Any]) -> None:
    """Wait for each checkpoint without reading it, so that the damage precedes the next one."""
    for step in range(STEPS):
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step, "text": "x" * 1000})
        raysgd.barrier()
        time.sleep(0.2)


# -- other processes ---------------------------------------------------------------------------------------------------


def test_plan_kills_the_controller(ray_cluster: Any, tmp_path: Path) -> None:
    before = ClusterState.now()
    plan = FaultPlan([KillTrainerActor(rank=1, step=3)])
    with make_trainer(tmp_path) as trainer:
        pids(trainer)
        with pytest.raises(LeakError, match="placement group"):
            check_cluster(before, timeout_s=0)
        trainer.run(plan.wrap(saving_loop), {}, callbacks=quiet())
        plan.assert_all_fired()
        assert are_gone([fired.pid for fired in plan.fired])
        check(trainer)
        (failure,) = events_of(trainer, "failure")
        assert "the controller's process died" in failure["error"]
    check_cluster(before, timeout_s=PATIENCE_S)


def test_plan_calls_the_test_at_a_result(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def until_file_exists(config: dict[str, Any]) -> None:
        step = 0
        while not os.path.exists(config["go"]):
            raysgd.report(step=step)
            step += 1
            time.sleep(0.01)

    plan = FaultPlan([RemoveNode(step=4, remove=go.touch)])
    trainer.run(plan.wrap(until_file_exists), {"go": str(go)}, callbacks=[*quiet(), plan.driver_callback()])
    plan.assert_all_fired()
    assert plan.fired[0].pid == os.getpid()
    check(trainer)


DRIVER = """
import os, sys, time
import ray, raysgd
from raysgd.testing import FaultPlan, KillDriver

def train_func():
    for step in range(1000):
        raysgd.report(step=step)
        time.sleep(0.01)

address, folder = sys.argv[1:]
ray.init(address=address, namespace="tests", log_to_driver=False)
plan = FaultPlan([KillDriver(rank=0, step=3)], folder=folder)
with raysgd.Trainer(1, "none", run_config=raysgd.RunConfig(storage_path=folder)) as trainer:
    trainer.run(plan.wrap(train_func))
"""


@pytest.mark.timeout(300)
def test_plan_kills_the_driver(ray_cluster: dict[str, Any], tmp_path: Path, trainer: raysgd.Trainer) -> None:
    trainer.shutdown()
    before = ClusterState.now()
    command = [sys.executable, "-c", DRIVER, ray_cluster["gcs_address"], str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == -9, done.stderr
    plan = FaultPlan([KillDriver(rank=0, step=3)], folder=tmp_path)
    plan.assert_all_fired()
    assert are_gone([plan.fired[0].pid])
    check_cluster(before, timeout_s=PATIENCE_S)
