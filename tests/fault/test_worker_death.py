"""Workers that are killed or end by themselves: the run continues with the survivors' processes, or raises the reason.

A train_func here breaks its own process at a place of its own choosing, once: a marker in a folder says that it did.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.backends.none import NoneBackend
from raysgd.errors import AttemptEnded, UsageError, WorkerDiedError, WorkerError
from raysgd.result import AUTOMATIC_KEYS
from raysgd.workers.process.attempt import SAMPLE_INTERVAL_S
from support.poll import until
from support.runs import (
    PATIENCE_S,
    are_gone,
    events_of,
    is_alive,
    latest_run,
    make_trainer,
    once,
    pids,
    quiet,
    travels_by_value,
)

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)


#: With a grace in which survivors leave the attempt on a busy machine, too.
TRAINER = {"failure_config": raysgd.FailureConfig(max_failures=2, abort_grace_s=20)}


def count(folder: str, what: str) -> None:
    """Create a file, so that calls can be counted."""
    Path(folder, f"{what}-{time.time_ns()}-{os.getpid()}").touch()


def counted(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def wait_for_checkpoint_of(step: int) -> None:
    """Wait until a checkpoint of this step, or of a later one, is committed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = raysgd.load_checkpoint()
        if state is not None and state["step"] >= step:
            return
        time.sleep(0.01)
    raise TimeoutError


def saving_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Make six steps, each saved and reported; rank 1 dies once, after step 3."""
    state = raysgd.load_checkpoint()
    start = 0 if state is None else state["step"] + 1
    for step in range(start, 6):
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step, pid=os.getpid())
        if step == 3 and raysgd.world_rank() == 1 and not os.path.exists(config["folder"] + "/died"):
            wait_for_checkpoint_of(3)
            time.sleep(0.3)  # the report of step 3 is sent by then, which stands behind its save
            raysgd.report(step=-1, pid=os.getpid())  # rank 0 does not make this report, so its round is never complete
            once(config["folder"], "died")
            die()
    return {"start": start, "pid": os.getpid()}


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_survivors_keep_their_processes_and_resume_from_the_newest_checkpoint(
    trainer: raysgd.Trainer, tmp_path: Path
) -> None:
    before = pids(trainer)
    stream = trainer.run_generator(saving_loop, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
    results = list(stream)
    returned = stream.get_returns()

    assert [value["start"] for value in returned] == [4, 4]
    assert returned[0]["pid"] == before[0], "the survivor was replaced"
    assert returned[1]["pid"] not in before
    assert not is_alive(before[1])

    last = {result["training_iteration"]: result for result in results}
    assert [last[i]["step"] for i in sorted(last)] == list(range(6))
    iterations = [(result["attempt"], result["training_iteration"]) for result in results]
    assert iterations == sorted(set(iterations)), "repeated within an attempt"
    assert iterations[-2:] == [(2, 5), (2, 6)], "iterations have a gap"
    assert all(set(result) == {"step", "pid"} | AUTOMATIC_KEYS for result in results)
    total = [last[i]["time_total_s"] for i in sorted(last)]
    assert total == sorted(total), "the time started again"

    (failure,) = events_of(trainer, "failure")
    assert failure["ranks"] == [1] and failure["action"] == "retry 1"
    assert f"rank 1 on {os.uname().nodename}" in failure["error"]
    up = [(event["rank"], event["pid"]) for event in events_of(trainer, "worker_up")]
    assert up == [(0, before[0]), (1, before[1]), (0, before[0]), (1, returned[1]["pid"])]
    run = latest_run(trainer)
    assert run.outcome == "done"
    assert list(run.metrics["training_iteration"]) == [1, 2, 3, 4, 5, 6]
    assert list(run.metrics["step"]) == list(range(6))


def test_run_resumes_after_the_driver_killed_a_worker(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> int:
        raysgd.report(pid=os.getpid())
        while not os.path.exists(config["go"]):
            time.sleep(0.01)
        return os.getpid()

    stream = trainer.run_generator(train_func, {"go": str(tmp_path / "go")}, callbacks=quiet(), returns="all")
    victim, survivor = (metrics["pid"] for metrics in next(stream).workers)
    os.kill(victim, signal.SIGKILL)
    again = next(result for result in stream if result["attempt"] == 2)
    assert again["training_iteration"] == 1
    (tmp_path / "go").write_text("")
    assert stream.get_returns() == [again["pid"], survivor]
    assert again["pid"] != victim


def test_ranks_that_had_returned_run_again_after_a_death(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> str:
        count(config["folder"], f"rank{raysgd.world_rank()}")
        raysgd.barrier()
        if raysgd.world_rank() == 1 and once(config["folder"], "died"):
            time.sleep(0.3)  # rank 0 has returned by now
            die()
        return f"attempt {len(list(Path(config['folder']).glob('rank0-*')))}"

    found = trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
    assert found == ["attempt 2", "attempt 2"]
    assert (counted(tmp_path, "rank0"), counted(tmp_path, "rank1")) == (2, 2)


def test_two_deaths_at_once_are_one_failure(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> str:
        rank, folder = raysgd.world_rank(), Path(config["folder"])
        if once(config["folder"], f"came{rank}"):
            (folder / f"pid{rank}").write_text(str(os.getpid()))
            raysgd.barrier()
            if rank == 0:
                os.kill(int((folder / "pid1").read_text()), signal.SIGKILL)
                die()
            time.sleep(60)
        return "done"

    assert trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet()) == "done"
    (failure,) = events_of(trainer, "failure")
    # The controller may notice the second death when it has decided what follows from the first.
    assert failure["ranks"] and set(failure["ranks"]) <= {0, 1} and failure["action"] == "retry 1"


# -- the checkpoint that a run resumes from ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["state", "path", "checkpoint"])
def test_death_before_the_first_save_resumes_from_the_given_checkpoint(
    trainer: raysgd.Trainer, tmp_path: Path, kind: str
) -> None:
    def train_func(config: dict[str, Any]) -> tuple[Any, int]:
        state = raysgd.load_checkpoint()
        raysgd.report(step=state["step"] + 1)
        while not os.path.exists(config["go"]):
            time.sleep(0.01)
        if raysgd.world_rank() == 0 and once(config["folder"], "died"):
            die()
        return state

    given: Any = {"step": 10}
    if kind != "state":
        trainer.run(saves_at_iteration_3, callbacks=quiet())
        checkpoint = trainer.get_last_checkpoint()
        assert checkpoint is not None
        given = checkpoint if kind == "checkpoint" else checkpoint.path
    config = {"folder": str(tmp_path), "go": str(tmp_path / "go")}
    stream = trainer.run_generator(train_func, config, resume_from=given, callbacks=quiet())
    assert next(stream)["attempt"] == 1  # from here on the next attempt has another number
    (tmp_path / "go").write_text("")
    (*_, last) = stream
    assert stream.get_returns() == {"step": 10}
    assert last["attempt"] == 2
    assert last["training_iteration"] == (1 if kind == "state" else 4)


def saves_at_iteration_3() -> None:
    for step in range(8, 11):
        raysgd.report(step=step)
    raysgd.save_checkpoint({"step": 10})


def test_run_never_resumes_from_a_checkpoint_of_the_previous_run(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> Any:
        state = raysgd.load_checkpoint()
        if raysgd.world_rank() == 0 and once(config["folder"], "died"):
            die()
        return state

    trainer.run(saves_at_iteration_3, callbacks=quiet())
    assert trainer.get_last_checkpoint() is not None
    assert trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet()) is None
    assert trainer.get_last_checkpoint() is None
    assert len(events_of(trainer, "failure")) == 1


# -- max_failures ------------------------------------------------------------------------------------------------------


def test_max_failures_retries_then_one_clear_error_for_each_run(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        if raysgd.world_rank() == 1:
            count(config["folder"], "attempt")
        raysgd.save_checkpoint({"step": 0})
        if raysgd.world_rank() == 1:
            wait_for_checkpoint_of(0)
            os._exit(7)
        time.sleep(0.01)
        raysgd.barrier()

    survivor = pids(trainer)[0]
    for run in (1, 2):  # failures are counted per run
        with pytest.raises(WorkerDiedError) as caught:
            trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet())
        assert counted(tmp_path, "attempt") == 3 * run
        text, error = str(caught.value), caught.value
        assert isinstance(error, WorkerError) and isinstance(error, RuntimeError)
        assert f"the worker process of rank 1 on {os.uname().nodename}" in text
        assert "failure 3 of the run; FailureConfig(max_failures=2) allows no more" in text
        (path,) = re.findall(r"Its last checkpoint, to resume from, is (\S+)\.", text)
        assert path.startswith(str(trainer.run_dir)) and raysgd.Checkpoint.from_path(path).load() == {"step": 0}
        assert (error.ranks, error.failures) == ((1,), 3)
        actions = [failure["action"] for failure in events_of(trainer, "failure")]
        assert actions == ["retry 1", "retry 2", "give up"]
        assert latest_run(trainer).outcome == "error"
    assert pids(trainer)[0] == survivor


def test_max_failures_0_raises_at_the_first_death(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func() -> None:
        count(str(tmp_path), "attempt")
        os._exit(1)

    with make_trainer(tmp_path / "runs", 1, failure_config=raysgd.FailureConfig(max_failures=0)) as trainer:
        with pytest.raises(
            WorkerDiedError, match=r"max_failures=0\) allows none\)\. The run has no checkpoint"
        ) as caught:
            trainer.run(train_func, callbacks=quiet())
        assert counted(tmp_path, "attempt") == 1
        assert "died: SYSTEM_ERROR, " in str(caught.value) and "SIGKILL" in str(caught.value)


def test_user_error_is_not_retried(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        count(config["folder"], f"rank{raysgd.world_rank()}")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet())
    assert counted(tmp_path, "rank0") <= 1 and counted(tmp_path, "rank1") <= 1
    assert events_of(trainer, "failure") == []


def test_worker_that_does_not_leave_its_attempt_is_replaced(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> int:
        raysgd.barrier()
        if once(config["folder"], f"stubborn{raysgd.world_rank()}"):
            if raysgd.world_rank() == 1:
                while not Path(config["folder"], "stubborn0").exists():
                    time.sleep(0.01)
                die()
            while True:
                try:
                    time.sleep(0.1)
                except AttemptEnded:
                    continue
        return os.getpid()

    with make_trainer(tmp_path / "runs", failure_config=raysgd.FailureConfig(max_failures=2)) as trainer:
        before = pids(trainer)
        after = trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        assert not set(before) & set(after)
        assert are_gone(before)
        (failure,) = events_of(trainer, "failure")
        assert failure["ranks"] == [1]
        assert any("killed ranks [0]" in warning["message"] for warning in events_of(trainer, "warning"))


# -- deaths while starting ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DyingConfig(raysgd.BackendConfig):
    """A backend that kills its worker process at a given step of the start, a given number of times."""

    name = "dying"
    folder: str
    step: str
    times: int = 1

    def make_backend(self) -> raysgd.Backend:
        return DyingBackend(self)


class DyingBackend(NoneBackend):
    def __init__(self, config: DyingConfig) -> None:
        self._config = config

    def load(self) -> None:
        self._reach("load")

    def open_rendezvous(self, node_ip: str) -> str:
        self._reach("open_rendezvous")
        return ""

    def init_process_group(self, member: raysgd.backends.base.Member) -> None:
        self._reach("init_process_group")

    def _reach(self, step: str) -> None:
        if step == self._config.step and any(once(self._config.folder, str(n)) for n in range(self._config.times)):
            die()


@pytest.mark.parametrize("step", ["load", "open_rendezvous", "init_process_group"])
def test_death_while_starting_counts_as_one_failure(ray_cluster: Any, tmp_path: Path, step: str) -> None:
    (tmp_path / "marks").mkdir()
    backend = DyingConfig(folder=str(tmp_path / "marks"), step=step)
    failure = raysgd.FailureConfig(max_failures=1)
    trainer = raysgd.Trainer(2, backend, run_config=raysgd.RunConfig(storage_path=tmp_path), failure_config=failure)
    with trainer:
        stream = trainer.run_generator(lambda: raysgd.report(step=1), callbacks=quiet())
        (result,) = stream
        assert stream.get_returns() is None
        assert (result["step"], result["training_iteration"]) == (1, 1)
        if step != "init_process_group":  # at that step the other rank may have entered train_func
            assert result["attempt"] == 1
        (event,) = events_of(trainer, "failure")
        assert event["action"] == "retry 1" and "died" in event["error"]
        assert latest_run(trainer).description["num_workers"] == 2


def test_two_deaths_while_starting_count_as_one_failure(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    backend = DyingConfig(folder=str(tmp_path / "marks"), step="load", times=2)
    failure = raysgd.FailureConfig(max_failures=1)
    trainer = raysgd.Trainer(2, backend, run_config=raysgd.RunConfig(storage_path=tmp_path), failure_config=failure)
    with trainer:
        assert trainer.run(raysgd.world_size, callbacks=quiet()) == 2
        assert len(os.listdir(tmp_path / "marks")) == 2
        assert len(events_of(trainer, "failure")) == 1


def test_repeated_deaths_while_starting_raise_one_clear_error(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    backend = DyingConfig(folder=str(tmp_path / "marks"), step="load", times=100)
    failure = raysgd.FailureConfig(max_failures=1)
    trainer = raysgd.Trainer(1, backend, run_config=raysgd.RunConfig(storage_path=tmp_path), failure_config=failure)
    with trainer, pytest.raises(WorkerDiedError, match=r"died.*failure 2 of the run") as caught:
        trainer.run(os.getpid, callbacks=quiet())
    assert caught.value.failures == 2
    assert len(os.listdir(tmp_path / "marks")) == 2


# -- the class API -----------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.count = raysgd.world_rank()

    def die_on(self, rank: int) -> int:
        if raysgd.world_rank() == rank:
            die()
        return self.count


def test_instances_are_lost_with_their_worker(trainer: raysgd.Trainer) -> None:
    trainer.start(Counter)
    survivor = trainer.execute_single(lambda counter: os.getpid())
    with pytest.raises(WorkerDiedError, match="the worker process of rank 1 died") as caught:
        trainer.execute(lambda counter: counter.die_on(1))
    assert caught.value.ranks == (1,)
    with pytest.raises(
        UsageError, match=r"an instance was lost with its worker; call start\(\.\.\.\) to make new ones"
    ):
        trainer.execute(lambda counter: counter.count)
    trainer.start(Counter)
    assert trainer.execute(lambda counter: counter.count) == [0, 1]
    assert trainer.execute_single(lambda counter: os.getpid()) == survivor
    trainer.start()


# -- deaths in a collective --------------------------------------------------------------------------------------------


def train_with_dropout(config: dict[str, Any]) -> tuple[str, int]:
    """Train with random numbers and a collective in each step; rank ``dies`` is killed in the middle of a step."""
    import torch

    state = raysgd.load_checkpoint()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1
    prepared = raysgd.torch.prepare_model(model)
    if state is not None:
        raysgd.load_checkpoint()  # restores the random generators of the save
    for step in range(start, 8):
        loss = prepared(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        raysgd.save_checkpoint({"step": step, "model": prepared, "optimizer": optimizer})
        raysgd.report(step=step, loss=loss)
        if step == 5 and "dies" in config:
            raysgd.barrier()  # all ranks reported this step; the last reports of the dying rank may not have been sent
            if raysgd.world_rank() == config["dies"] and once(config["folder"], "died"):
                die()  # the others are about to enter the next all-reduce
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest(), os.getpid()


def test_three_ranks_in_a_collective_end_as_without_the_death(ray_cluster: Any, tmp_path: Path) -> None:
    # The grace period is long for busy machines; a rank that is stuck in the collective never leaves it.
    failure = raysgd.FailureConfig(abort_grace_s=20)
    with make_trainer(tmp_path / "runs", 3, "torch", seed=7, deterministic=True, failure_config=failure) as trainer:
        fault_free = trainer.run(train_with_dropout, callbacks=quiet(), returns="all")
        before = [pid for _, pid in fault_free]
        config = {"dies": 1, "folder": str(tmp_path)}
        after = trainer.run(train_with_dropout, config, callbacks=quiet(), returns="all")
        assert (tmp_path / "died").exists()
        assert [after[0][1], after[2][1]] == [before[0], before[2]], "survivors were replaced"
        assert after[1][1] != before[1]
        assert [digest for digest, _ in after] == [digest for digest, _ in fault_free]
        (event,) = events_of(trainer, "failure")
        assert event["ranks"] == [1]
        assert until(lambda: not is_alive(before[1]), PATIENCE_S)
        steps = latest_run(trainer).metrics["step"]
        assert list(steps) == list(range(8))


# -- a broken stream ---------------------------------------------------------------------------------------------------


def test_framework_is_found_while_train_func_imports_it(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    """Sampling asks torch for GPUs, and the import of torch takes longer than one sample interval."""
    (tmp_path / "torch.py").write_text(f"import time\ntime.sleep({SAMPLE_INTERVAL_S + 1})\n__version__ = 'slow'\n")

    def train_func(config: dict[str, Any]) -> str:
        sys.path.insert(0, config["folder"])
        try:
            return str(importlib.import_module("torch").__version__)
        finally:
            sys.modules.pop("torch", None)  # other tests use the process

    assert trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet()) == "slow"
    assert events_of(trainer, "failure") == []


def test_worker_whose_stream_fails_is_killed(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    """Otherwise train_func would continue in a process that counts as dead."""

    def train_func(config: dict[str, Any]) -> int:
        if raysgd.world_rank() == 1 and once(config["folder"], "broke"):
            import psutil

            def breaks(*_: Any) -> None:
                raise ValueError("a mistake in raysgd")

            Path(config["folder"], "pid").write_text(str(os.getpid()))
            psutil.Process.memory_info = breaks  # type: ignore[method-assign]  # the stream's thread samples memory
            time.sleep(600)
        return os.getpid()

    after = trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
    broken = int((tmp_path / "pid").read_text())
    assert broken not in after
    assert until(lambda: not is_alive(broken), PATIENCE_S)
    (failure,) = events_of(trainer, "failure")
    assert failure["ranks"] == [1] and "its event stream failed: ValueError('a mistake in raysgd')" in failure["error"]


def test_returned_rank_joins_the_next_process_group(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> int:
        import torch.distributed as dist

        dist.barrier()
        if raysgd.world_rank() == 1 and once(config["folder"], "died"):
            time.sleep(1)  # rank 0 has returned, and is still in its group
            die()
        return os.getpid()

    with make_trainer(
        tmp_path / "runs", 2, "torch", failure_config=raysgd.FailureConfig(max_failures=1, abort_grace_s=20)
    ) as trainer:
        returned = trainer.run(train_func, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        up = [event["pid"] for event in events_of(trainer, "worker_up")]
        assert returned == up[2:] and up[0] == up[2] and up[1] != up[3]
        assert len(events_of(trainer, "failure")) == 1
