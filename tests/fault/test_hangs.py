"""Workers that hang because they are stopped or stuck in a loop, and busy workers, which do not hang."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import WorkerDiedError
from support.runs import are_gone, events_of, make_trainer, once, pids, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

HEARTBEAT_S = 3.0
PROGRESS_S = 5.0


#: On a busy machine survivors may need more than the usual time to leave; here they must keep their processes.
FAILURE = raysgd.FailureConfig(
    heartbeat_timeout_s=HEARTBEAT_S, progress_timeout_s=PROGRESS_S, abort_grace_s=20, max_failures=1
)
TRAINER = {"num_workers": 3, "backend": "torch", "failure_config": FAILURE}


def stop(config: dict[str, Any]) -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # sent to this thread, so that it stops immediately


def loop_for_ever(config: dict[str, Any]) -> None:
    while True:
        pass


def sleep_for_ever(config: dict[str, Any]) -> None:
    time.sleep(10_000)


def reduce_and_hang_once(config: dict[str, Any]) -> dict[str, Any]:
    """Make collectives and saves; rank 1 hangs once, in the given way, while the others are in a collective."""
    import torch
    import torch.distributed as dist

    state = raysgd.load_checkpoint()
    start = 0 if state is None else state["step"] + 1
    for step in range(start, 4):
        if step == 2 and raysgd.world_rank() == 1 and once(config["folder"], "hung"):
            while not all(Path(config["folder"], f"waits{rank}").exists() for rank in (0, 2)):
                time.sleep(0.01)
            config["hang"](config)
        elif step == 2:
            Path(config["folder"], f"waits{raysgd.world_rank()}").touch()
        dist.all_reduce(torch.ones(1))
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
        while (saved := raysgd.load_checkpoint()) is None or saved["step"] < step:
            time.sleep(0.01)
    return {"pid": os.getpid(), "start": start}


@pytest.mark.parametrize(
    ("hang", "kind", "reason"),
    [
        (stop, "silent", "it was stopped (SIGSTOP)"),
        (loop_for_ever, "stuck", "made no progress"),
        (sleep_for_ever, "stuck", "made no progress"),
    ],
    ids=["stopped", "loop", "sleep"],
)
def test_hung_worker_is_replaced_and_survivors_keep_their_processes(
    trainer: raysgd.Trainer, tmp_path: Path, hang: Any, kind: str, reason: str
) -> None:
    before = pids(trainer)
    config = {"folder": str(tmp_path), "hang": hang}
    returned = trainer.run(reduce_and_hang_once, config, callbacks=quiet(), returns="all")
    assert [value["start"] for value in returned] == [2, 2, 2]
    after = [value["pid"] for value in returned]
    assert after[0] == before[0] and after[2] == before[2] and after[1] not in before
    assert are_gone([before[1]], 2)
    (hung,) = events_of(trainer, "hang")
    assert (hung["rank"], hung["kind"]) == (1, kind)
    assert reason in hung["why"]
    assert set(hung["stacks"]) == {"0", "1", "2"}
    if kind == "stuck":  # py-spy leaves out the thread that stopped its own process
        assert hang.__name__ in hung["stacks"]["1"], "the stack does not show where it hangs"
    assert "all_reduce" in hung["stacks"]["0"]
    check_flight_records(trainer, hung)
    (failure,) = events_of(trainer, "failure")
    assert failure["ranks"] == [1] and "hung" in failure["error"]


def check_flight_records(trainer: raysgd.Trainer, hung: dict[str, Any]) -> None:
    """Check the last collectives of the ranks in the event, and in files in the format of torch's flight recorder."""
    for rank in ("0", "2"):
        (last,) = hung["collectives"][rank]
        assert (last["operation"], last["is_done"]) == ("gloo:all_reduce", False)
        assert last["sizes"] == [[1]]
    assert "; ranks 0, 2 wait in collective" in hung["why"]
    if "1" in hung["collectives"]:  # a stopped process cannot answer; one whose loop holds the GIL may be unable to
        assert hung["collectives"]["1"][0]["number"] == hung["collectives"]["0"][0]["number"] - 1
        assert "which rank 1 has not begun" in hung["why"]
    run_dir = trainer.run_dir
    assert run_dir is not None
    written = sorted(Path(run_dir, "flight_recorder", "attempt_1").glob("rank_?"))
    assert {"rank_0", "rank_2"} <= {path.name for path in written}
    assert pickle.loads(written[0].read_bytes())["entries"][-1]["profiling_name"] == "gloo:all_reduce"


def test_c_call_that_holds_the_gil_is_not_a_hang(ray_cluster: Any, tmp_path: Path) -> None:
    def count() -> float:
        """Make one long call during which no other thread of the process runs."""
        numbers, start = 10**8, time.monotonic()
        while True:
            sum(range(numbers))
            took, start = time.monotonic() - start, time.monotonic()
            if took > 3:
                return took
            numbers *= 2

    failure = raysgd.FailureConfig(max_failures=0, heartbeat_timeout_s=1.5)
    with make_trainer(tmp_path, failure_config=failure) as trainer:
        before = pids(trainer)
        assert trainer.run(count, callbacks=quiet()) > 3
        assert events_of(trainer, "hang") == [] and pids(trainer) == before


def test_slow_steps_within_the_limit_are_not_a_hang(trainer: raysgd.Trainer) -> None:
    def slow() -> None:
        for step in range(4):
            time.sleep(0.7 * PROGRESS_S)
            raysgd.report(step=step)

    trainer.run(slow, callbacks=quiet())
    assert events_of(trainer, "hang") == []


def test_one_hang_too_many_ends_the_run_with_the_rank(ray_cluster: Any, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=0, heartbeat_timeout_s=1.0)

    def stop_rank_1() -> None:
        if raysgd.world_rank() == 1:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        raysgd.barrier()

    with (
        make_trainer(tmp_path, failure_config=failure) as trainer,
        pytest.raises(WorkerDiedError, match=r"rank 1 on .* hung: it gave no sign of life for .*SIGSTOP") as raised,
    ):
        trainer.run(stop_rank_1, callbacks=quiet())
    assert raised.value.ranks == (1,)


def test_worker_stopped_for_less_than_the_timeout_continues(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def step_on(config: dict[str, Any]) -> int:
        for step in range(30):
            time.sleep(0.1)
            raysgd.report(step=step)
        return os.getpid()

    before = pids(trainer)
    stream = trainer.run_generator(step_on, {}, callbacks=quiet(), returns="all")
    next(stream)
    os.kill(before[1], signal.SIGSTOP)
    time.sleep(0.3 * HEARTBEAT_S)
    os.kill(before[1], signal.SIGCONT)
    assert stream.get_returns() == before
    assert events_of(trainer, "hang") == []
