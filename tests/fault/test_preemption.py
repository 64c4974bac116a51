"""Workers that get SIGTERM while they train: the run continues without them, repeats nothing, and counts no failure."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import raysgd
from support.poll import until
from support.runs import (
    PATIENCE_S,
    are_gone,
    events_of,
    is_alive,
    latest_run,
    make_trainer,
    pids,
    quiet,
    travels_by_value,
)

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)


TRAINER = {"failure_config": raysgd.FailureConfig(max_failures=0, abort_grace_s=20)}


def until_file_exists(config: dict[str, Any]) -> dict[str, Any]:
    """Make steps of 0.02 s with a collective until the file ``enough`` exists; files list the steps of every rank.

    ``checks_stop``: check should_stop() after each step, and save a last checkpoint when it is set; ``saves_each``:
    the number of steps between two other checkpoints.
    """
    state = raysgd.load_checkpoint()
    start = step = 0 if state is None else state["step"] + 1
    while not raysgd.broadcast(Path(config["folder"], "enough").exists()):
        raysgd.barrier()
        with Path(config["folder"], f"steps-{raysgd.world_rank()}").open("a") as file:
            file.write(f"{step}\n")
        raysgd.report(step=step, pid=os.getpid())
        is_last = config["checks_stop"] and raysgd.should_stop()
        if is_last or (config["saves_each"] and step % config["saves_each"] == 0):
            raysgd.save_checkpoint({"step": step})
        if is_last:
            break
        step += 1
        time.sleep(0.02)
    return {"start": start, "pid": os.getpid()}


def start(
    trainer: raysgd.Trainer, folder: Path, *, checks_stop: bool, saves_each: int, also: Sequence[raysgd.Callback] = ()
) -> tuple[raysgd.ResultStream, list[int]]:
    """Start a run, wait for a few steps, and return it with the processes of its ranks."""
    config = {"folder": str(folder), "checks_stop": checks_stop, "saves_each": saves_each}
    stream = trainer.run_generator(until_file_exists, config, callbacks=[*quiet(), *also], returns="all")
    result = next(result for result in stream if result["training_iteration"] == 3)
    return stream, [metrics["pid"] for metrics in result.workers]


def wait_for_attempt(stream: raysgd.ResultStream, attempt: int) -> raysgd.Result:
    deadline = time.monotonic() + PATIENCE_S
    for result in stream:
        if result["attempt"] == attempt:
            return result
        assert time.monotonic() < deadline, "nobody has left"
    raise AssertionError("the run has ended")


def journal_of(stream: raysgd.ResultStream) -> str:
    """Return the events of a live run that are written so far."""
    path = Path(str(stream.run_dir), "events.jsonl")
    return path.read_text() if path.exists() else ""


def finish(stream: raysgd.ResultStream, folder: Path) -> Any:
    Path(folder, "enough").touch()
    return stream.get_returns()


def steps_of(folder: Path, rank: int) -> list[int]:
    return [int(line) for line in Path(folder, f"steps-{rank}").read_text().split()]


@pytest.mark.parametrize(("checks_stop", "saves_each"), [(True, 0), (False, 2), (True, 3)])
def test_preempted_worker_is_replaced_and_no_step_is_lost_or_repeated(
    trainer: raysgd.Trainer, tmp_path: Path, checks_stop: bool, saves_each: int
) -> None:
    stream, before = start(trainer, tmp_path, checks_stop=checks_stop, saves_each=saves_each)
    os.kill(before[1], signal.SIGTERM)
    after = [metrics["pid"] for metrics in wait_for_attempt(stream, 2).workers]
    assert after[0] == before[0], "the survivor was replaced"
    assert after[1] not in before and are_gone(before[1:])
    returned = finish(stream, tmp_path)
    assert [value["pid"] for value in returned] == after
    assert returned[0]["start"] > 0
    for rank in (0, 1):
        steps = steps_of(tmp_path, rank)
        assert steps == list(range(len(steps)))
    assert events_of(trainer, "failure") == []
    (preemption,) = events_of(trainer, "preemption")
    assert (preemption["rank"], preemption["why"]) == (1, "its process got SIGTERM")
    assert os.uname().nodename in preemption["node"]
    (regroup,) = events_of(trainer, "regroup")
    assert regroup["why"] == "rank 1 is preempted: its process got SIGTERM"
    run = latest_run(trainer)
    assert run.outcome == "done"
    assert run.metrics["step"].tolist() == list(range(len(run.metrics)))


def test_all_workers_are_preempted_at_once(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    stream, before = start(trainer, tmp_path, checks_stop=True, saves_each=0)
    for pid in before:
        os.kill(pid, signal.SIGTERM)
    after = [metrics["pid"] for metrics in wait_for_attempt(stream, 2).workers]
    assert not set(after) & set(before) and are_gone(before)
    finish(stream, tmp_path)
    steps = steps_of(tmp_path, 0)
    assert steps == list(range(len(steps)))
    assert events_of(trainer, "failure") == []
    assert sorted(event["rank"] for event in events_of(trainer, "preemption")) == [0, 1]


def test_torch_group_forms_again_after_preemption(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> int:
        import torch
        import torch.distributed as dist

        state = raysgd.load_checkpoint()
        step = 0 if state is None else state["step"] + 1
        while not raysgd.broadcast(Path(config["folder"], "enough").exists()):
            total = torch.ones(1)
            dist.all_reduce(total)
            raysgd.report(step=step, total=total.item(), pid=os.getpid())
            if raysgd.should_stop():
                raysgd.save_checkpoint({"step": step})
                dist.all_reduce(total)
                break
            step += 1
        return os.getpid()

    with make_trainer(
        tmp_path / "runs", 2, "torch", failure_config=raysgd.FailureConfig(max_failures=0, abort_grace_s=20)
    ) as trainer:
        stream = trainer.run_generator(train_func, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        before = [metrics["pid"] for metrics in next(stream).workers]
        for attempt, rank in [(2, 0), (3, 1)]:  # rank 0 hosts the rendezvous
            os.kill(before[rank], signal.SIGTERM)
            after = [metrics["pid"] for metrics in wait_for_attempt(stream, attempt).workers]
            assert after[1 - rank] == before[1 - rank] and after[rank] != before[rank]
            before = after
        assert finish(stream, tmp_path) == before
        run = latest_run(trainer)
        assert events_of(trainer, "failure") == []
        assert run.metrics["step"].tolist() == list(range(len(run.metrics)))
        assert set(run.metrics["total"]) == {2.0}


@pytest.mark.parametrize("then", [signal.SIGKILL, signal.SIGTERM])
def test_preempted_worker_killed_before_its_grace_ends_is_not_a_failure(
    trainer: raysgd.Trainer, tmp_path: Path, then: signal.Signals
) -> None:
    """The loop neither checks should_stop() nor saves; the platform kills the worker, or repeats SIGTERM."""
    stream, before = start(trainer, tmp_path, checks_stop=False, saves_each=0)
    os.kill(before[1], signal.SIGTERM)
    assert until(lambda: next(stream) and "preemption" in journal_of(stream), PATIENCE_S)
    assert is_alive(before[1])
    os.kill(before[1], then)
    after = [metrics["pid"] for metrics in wait_for_attempt(stream, 2).workers]
    assert after[0] == before[0] and are_gone(before[1:])
    assert finish(stream, tmp_path)[0]["start"] == 0
    assert events_of(trainer, "failure") == []
    (regroup,) = events_of(trainer, "regroup")
    assert "rank 1" in regroup["why"] and "died" in regroup["why"]


def test_preemption_grace_is_not_exceeded(ray_cluster: Any, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=0, preemption_grace_s=0.5, abort_grace_s=20)
    with make_trainer(tmp_path / "runs", failure_config=failure) as trainer:
        stream, before = start(trainer, tmp_path, checks_stop=False, saves_each=0)
        os.kill(before[0], signal.SIGTERM)
        after = [metrics["pid"] for metrics in wait_for_attempt(stream, 2).workers]
        assert after[1] == before[1] and are_gone(before[:1])
        finish(stream, tmp_path)
        assert events_of(trainer, "failure") == []


def test_elastic_group_continues_with_the_remaining_workers(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(
        tmp_path / "runs", (1, 2), failure_config=raysgd.FailureConfig(max_failures=0, abort_grace_s=20)
    ) as trainer:
        stream, before = start(trainer, tmp_path, checks_stop=True, saves_each=0)
        os.kill(before[0], signal.SIGTERM)
        result = wait_for_attempt(stream, 2)
        assert (result["world_size"], result["pid"]) == (1, before[1])
        returned = finish(stream, tmp_path)
        steps = steps_of(tmp_path, 0)
        assert returned[0]["pid"] == before[1] and steps == list(range(len(steps)))
        assert events_of(trainer, "failure") == []
        assert events_of(trainer, "resize")[0] == {"old": 2, "new": 1}


def test_spare_replaces_a_preempted_worker(ray_cluster: Any, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=0, num_spares=1)
    with make_trainer(tmp_path / "runs", 1, failure_config=failure) as trainer:
        stream, before = start(trainer, tmp_path, checks_stop=True, saves_each=0)
        os.kill(before[0], signal.SIGTERM)
        result = wait_for_attempt(stream, 2)
        assert result["pid"] not in before and are_gone(before)
        finish(stream, tmp_path)
        assert events_of(trainer, "failure") == []


# -- other cases -------------------------------------------------------------------------------------------------------


def test_idle_worker_ends_at_once_at_sigterm(trainer: raysgd.Trainer) -> None:
    before = pids(trainer)
    os.kill(before[1], signal.SIGTERM)
    assert are_gone(before[1:])
    after = pids(trainer)
    assert after[0] == before[0] and after[1] not in before
    assert events_of(trainer, "failure") == []


class StopWhenFileExists(raysgd.Callback):
    """Stops the run when a file exists."""

    runs_in = "driver"

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_result(self, result: raysgd.Result) -> None:
        if self.path.exists():
            raise raysgd.Stop("enough")


def test_user_stop_takes_precedence_over_preemption(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    """The loop does not check should_stop(), so it ends at a report."""
    stream, before = start(
        trainer, tmp_path, checks_stop=False, saves_each=0, also=[StopWhenFileExists(tmp_path / "halt")]
    )
    os.kill(before[1], signal.SIGTERM)
    assert until(lambda: next(stream) and "preemption" in journal_of(stream), PATIENCE_S)
    Path(tmp_path, "halt").touch()
    assert {result["attempt"] for result in stream} == {1}
    run = latest_run(trainer)
    assert run.outcome == "stopped" and events_of(trainer, "regroup") == []
    assert are_gone(before[1:])
    assert pids(trainer)[0] == before[0]


def test_run_that_finishes_despite_a_notice_is_done(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    """A run that finished is not repeated; the preempted worker still ends."""
    stream, before = start(trainer, tmp_path, checks_stop=False, saves_each=0)
    os.kill(before[1], signal.SIGTERM)
    assert [value["pid"] for value in finish(stream, tmp_path)] == before
    assert latest_run(trainer).outcome == "done"
    assert events_of(trainer, "regroup") == [] and are_gone(before[1:])


def test_sigterm_to_a_child_process_is_not_a_preemption(trainer: raysgd.Trainer) -> None:
    """A process of a data loader inherits the handler, and must not act for its parent."""

    def train_func() -> tuple[int | None, bool]:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(10)
        return child.exitcode, raysgd.should_stop()

    returned = trainer.run(train_func, callbacks=quiet(), returns="all")
    assert all(code not in (0, None) and not saw for code, saw in returned)
    assert events_of(trainer, "preemption") == []
