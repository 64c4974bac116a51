"""Horovod's own elastic mode: what is under `hvd.elastic.run` goes on inside train_func when workers are lost and come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from support.frameworks import needs_horovod
from support.poll import until
from support.runs import PATIENCE_S, events_of, latest_run, make_trainer, once, quiet, travels_by_value

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fault,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
    needs_horovod,
]
travels_by_value(__name__)

STEPS = 12


def horovod(**settings: Any) -> raysgd.HorovodConfig:
    return raysgd.HorovodConfig(elastic="horovod", **settings)


def elastic(config: dict[str, Any]) -> dict[str, Any]:
    """Adds up over all ranks in each step, and commits it.

    ``kill``: the ranks that die at each step, once. ``until``: a file that ends it; without it there are `STEPS` steps.
    ``each_step``: what else is done; ``after_report``: the same, later.
    """
    import horovod.torch as hvd
    import torch

    groups: list[tuple[int, int, int]] = []
    folder = config["folder"]

    def is_over(state: Any) -> bool:
        if "until" not in config:
            return bool(state.step >= STEPS)
        ends = torch.tensor(float(Path(folder, config["until"]).exists()))
        return float(hvd.allreduce(ends, op=hvd.Sum, name="over")) > 0

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def go_on(state: Any) -> None:
        groups.append((hvd.rank(), hvd.size(), state.step))
        while not is_over(state):
            for rank in config.get("kill", {}).get(state.step, ()):
                if rank == hvd.rank() and once(folder, f"killed_{state.step}_{rank}"):
                    Path(folder, f"at_{state.step}").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
            total = float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total"))
            if "each_step" in config:
                config["each_step"](config, state)
            raysgd.report(step=state.step, total=total, size=hvd.size(), pid=os.getpid(), rank=raysgd.world_rank())
            if "after_report" in config:
                config["after_report"](config, state)
            state.totals = [*state.totals, total]
            state.step += 1
            state.commit()
            time.sleep(0.02)

    saved = raysgd.load_checkpoint() or {"step": 0, "totals": []}
    weights = torch.nn.Linear(3, 1)
    state = hvd.elastic.TorchState(model=weights, step=saved["step"], totals=saved["totals"])
    if "before" in config:
        config["before"](config)
    go_on(state)
    return {
        "pid": os.getpid(),
        "rank": hvd.rank(),
        "groups": groups,
        "totals": state.totals,
        "weight": weights.weight.sum().item(),
    }


def run(trainer: raysgd.Trainer, folder: Path, **config: Any) -> tuple[list[raysgd.Result], list[dict[str, Any]]]:
    """The results, and what each rank returned."""
    stream = trainer.run_generator(elastic, {"folder": str(folder), **config}, callbacks=quiet(), returns="all")
    results = list(stream)
    return results, stream.get_returns()


def check_steps(results: list[raysgd.Result], returned: list[dict[str, Any]], steps: int = STEPS) -> None:
    """Each step was done, every sum is that of its group, and no step was reported twice."""
    assert [each["rank"] for each in returned] == list(range(len(returned)))
    assert [result["training_iteration"] for result in results] == list(range(1, len(results) + 1))
    assert len(results) in (0, steps)
    for result in results:
        assert [worker["rank"] for worker in result.workers] == list(range(result["world_size"]))
        assert result["total"] == result["size"] == result["world_size"] == len(result.workers)
    assert {len(each["totals"]) for each in returned} == {steps}
    assert len({each["weight"] for each in returned}) == 1


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_go_on_from_their_last_commit(tmp_path: Path, victim: int) -> None:
    """The one who replaces the dead gets its state from them: it is the last rank, whichever was lost."""
    failure = raysgd.FailureConfig(max_failures=1, spares=1)
    with make_trainer(tmp_path, 3, horovod(), failure=failure) as trainer:
        results, returned = run(trainer, tmp_path, kill={5: [victim]})
        check_steps(results, returned)
        before = {worker["rank"]: worker["pid"] for worker in results[0].workers}
        survivors = [before[rank] for rank in range(3) if rank != victim]
        assert [each["pid"] for each in returned[:2]] == survivors
        assert returned[2]["pid"] not in before.values()
        assert [each["groups"] for each in returned] == [
            *([(rank, 3, 0), (at, 3, 5)] for at, rank in enumerate(sorted({0, 1, 2} - {victim}))),
            [(2, 3, 5)],
        ]
        assert [event["ranks"] for event in events_of(trainer, "failure")] == [[victim]]
        assert {result["attempt"] for result in results} == {1, 2}


def dies_after_its_report(config: dict[str, Any], state: Any) -> None:
    if state.step == 3 and raysgd.world_rank() == 1 and once(config["folder"], "died"):
        time.sleep(config["lives_on_s"])
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("lives_on_s", [0.0, 0.5], ids=["perhaps unheard", "heard"])
def test_a_rank_that_dies_between_its_report_and_its_commit(tmp_path: Path, lives_on_s: float) -> None:
    """All commit a step or none: its round is made again, whether or not the last report has left the process."""
    config = {"folder": str(tmp_path), "lives_on_s": lives_on_s, "after_report": dies_after_its_report}
    with make_trainer(tmp_path, 2, horovod(), failure=raysgd.FailureConfig(max_failures=1)) as trainer:
        trainer.run(elastic, config, callbacks=quiet())
        assert [begins["iterations_before"] for begins in events_of(trainer, "attempt_start")] == [0, 3]
        told = latest_run(trainer).metrics
    assert told["training_iteration"].tolist() == list(range(1, STEPS + 1))
    assert told["step"].tolist() == list(range(STEPS))
    assert told["attempt"].tolist() == [1] * 3 + [2] * (STEPS - 3)


def test_two_losses_one_after_the_other(tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, horovod(), failure=raysgd.FailureConfig(max_failures=2)) as trainer:
        results, returned = run(trainer, tmp_path, kill={3: [0], 8: [0]})
        check_steps(results, returned)
        assert [group[2] for group in returned[0]["groups"]] == [3, 8]  # it came for the first, and outlived the second


def test_a_group_that_shrinks_and_grows(tmp_path: Path) -> None:
    """Those who are left go on at once, and take in the new one at a commit."""
    with make_trainer(tmp_path, (2, 3), horovod(), failure=raysgd.FailureConfig(max_failures=1)) as trainer:
        config = {"folder": str(tmp_path), "until": "enough", "kill": {30: [1]}}
        stream = trainer.run_generator(elastic, config, callbacks=quiet(), returns="all")
        sizes: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        for result in stream:
            assert time.monotonic() < deadline, f"sizes so far: {sizes}"
            if not sizes or sizes[-1] != result["world_size"]:
                sizes.append(result["world_size"])
            if sizes[-2:] == [2, 3] and (tmp_path / "at_30").exists():
                (tmp_path / "enough").touch()
        returned = stream.get_returns()
        assert sizes[-3:] == [3, 2, 3]
        check_steps([], returned, len(returned[0]["totals"]))
        assert [group[:2] for group in returned[0]["groups"]][-3:] == [(0, 3), (0, 2), (0, 3)]
        assert len(returned[2]["groups"]) == 1
        assert len(events_of(trainer, "failure")) == 1  # growing is none


def save_and_meet(config: dict[str, Any], state: Any) -> None:
    raysgd.barrier()
    assert raysgd.broadcast(state.step) == state.step
    raysgd.save_checkpoint({"step": state.step + 1, "totals": [*state.totals, 0.0]})
    assert not raysgd.should_stop()


def test_what_is_asked_of_raysgd_between_collectives(tmp_path: Path) -> None:
    """A rank that waits for a dead one in `barrier` is freed as by a broken collective."""
    failure = raysgd.FailureConfig(max_failures=2, spares=1)
    with make_trainer(tmp_path, 3, horovod(), failure=failure) as trainer:
        results, returned = run(trainer, tmp_path, kill={4: [1], 8: [0]}, each_step=save_and_meet)
        check_steps(results, returned)
        assert returned[0]["groups"][0] == (2, 3, 0)  # it outlived both, and never left train_func
        assert trainer.get_last_checkpoint().load()["step"] == STEPS


def test_where_nobody_is_left_the_newest_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, horovod(), failure=raysgd.FailureConfig(max_failures=1)) as trainer:
        _, returned = run(trainer, tmp_path, kill={6: [0, 1]}, each_step=save_and_meet)
        assert len(returned[0]["totals"]) == STEPS
        (only,) = returned[0]["groups"]
        assert 4 <= only[2] <= 6  # the last saves may have been on their way


def die_once(config: dict[str, Any]) -> None:
    if raysgd.world_rank() == 1 and once(config["folder"], "killed_before"):
        os.kill(os.getpid(), signal.SIGKILL)
    import horovod.torch as hvd
    import torch

    hvd.allreduce(torch.ones(1), name="before")


def test_outside_of_such_a_function_train_func_is_entered_again(tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, horovod(), failure=raysgd.FailureConfig(max_failures=1)) as trainer:
        results, returned = run(trainer, tmp_path, before=die_once)
        check_steps(results, returned)
        assert {result["attempt"] for result in results} == {2}
        assert [len(each["groups"]) for each in returned] == [1, 1]


def break_once(config: dict[str, Any], state: Any) -> None:
    from horovod.common.exceptions import HorovodInternalError

    if state.step == 5 and raysgd.world_rank() == 1 and once(config["folder"], "broken"):
        raise HorovodInternalError("the network, say")


def test_a_group_that_breaks_without_a_death_is_formed_again(tmp_path: Path) -> None:
    """It counts as a failure, so that it does not go on for ever."""
    with make_trainer(tmp_path, 2, horovod(), failure=raysgd.FailureConfig(max_failures=1)) as trainer:
        results, returned = run(trainer, tmp_path, each_step=break_once)
        check_steps(results, returned)
        assert [len(each["groups"]) for each in returned] == [2, 2]
        (failure,) = events_of(trainer, "failure")
        assert "no worker had died" in failure["error"]


def fail(config: dict[str, Any], state: Any) -> None:
    if state.step == 5 and raysgd.world_rank() == 1:
        raise LookupError("the cause")


def threads_of_train_func(config: dict[str, Any]) -> int:
    return sum(thread.name == "raysgd-train" for thread in threading.enumerate())


def test_an_error_of_ones_own_is_raised_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    with make_trainer(tmp_path, 3, horovod()) as trainer:
        with pytest.raises(LookupError, match="the cause"):
            run(trainer, tmp_path, each_step=fail)
        assert trainer.run(threads_of_train_func, callbacks=quiet(), returns="all") == [1, 1, 1]
        check_steps(*run(trainer, tmp_path))


@pytest.fixture
def going(tmp_path: Path) -> Iterator[tuple[raysgd.Trainer, raysgd.ResultStream]]:
    """A run that goes on until the file ``enough`` is there, with a checkpoint in each step and five results seen."""
    with make_trainer(tmp_path, 2, horovod(), failure=raysgd.FailureConfig(max_failures=3)) as trainer:
        config = {"folder": str(tmp_path), "until": "enough", "each_step": save_and_meet}
        stream = trainer.run_generator(elastic, config, callbacks=quiet(), returns="all")
        for _ in range(5):
            next(stream)
        yield trainer, stream


def test_a_run_that_is_cancelled_while_ranks_wait(going: tuple[raysgd.Trainer, raysgd.ResultStream]) -> None:
    """The one who waits for a new peer leaves train_func, and serves the next run."""
    trainer, stream = going
    os.kill(int(next(stream).workers[1]["pid"]), signal.SIGKILL)
    assert until(lambda: trainer.status().num_failures == 1, PATIENCE_S, interval_s=0.01)
    stream.cancel()
    assert until(lambda: trainer.status().state == "cancelled", PATIENCE_S)
    assert trainer.run(threads_of_train_func, callbacks=quiet(), returns="all") == [1, 1]


def test_a_rest_is_as_ever(going: tuple[raysgd.Trainer, raysgd.ResultStream], tmp_path: Path) -> None:
    """The workers are given back, so the newest checkpoint is what it goes on from."""
    trainer, stream = going
    trainer.pause()
    assert trainer.status().state == "paused"
    trainer.resume()
    (tmp_path / "enough").touch()
    returned = stream.get_returns()
    assert returned[0]["groups"][0][2] >= 5
    assert len(returned[0]["groups"]) == 1


def reads(config: dict[str, Any]) -> list[list[int]]:
    """Two epochs of a dataset, each batch committed; the rows of all ranks, by epoch."""
    import horovod.torch as hvd

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def go_on(state: Any) -> None:
        batches = raysgd.get_dataset().get_split().to_torch(global_batch_size=6, shuffle="full")
        while state.epoch < 2:
            for batch in batches:
                rows = [row for part in hvd.allgather_object(batch["row"].tolist(), name="rows") for row in part]
                is_there = len(state.seen[-1]) == 30 and state.epoch == config["epoch"] and hvd.rank() == 1
                if is_there and once(config["folder"], "killed"):
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.barrier()  # what follows is done by all of a group, or by none
                state.seen = [*state.seen[:-1], [*state.seen[-1], *rows]]
                if len(state.seen[-1]) % 12 == 0 or len(state.seen[-1]) == 60:
                    state.commit()  # not after each: what comes after the last commit is read again
            state.epoch += 1
            state.seen = [*state.seen, []]
            state.commit()

    state = hvd.elastic.TorchState(epoch=0, seen=[[]])
    go_on(state)
    seen: list[list[int]] = state.seen
    return seen


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_row_is_read_once_whatever_the_group(tmp_path: Path, epoch: int) -> None:
    """The place in the data is committed with the state: three ranks begin the epoch, and two go on within it."""
    with make_trainer(tmp_path, (2, 3), horovod(), failure=raysgd.FailureConfig(max_failures=1), seed=0) as trainer:
        config = {"folder": str(tmp_path), "epoch": epoch}
        seen = trainer.run(reads, config, dataset={"row": np.arange(60)}, callbacks=quiet())
        assert len(events_of(trainer, "failure")) == 1
    assert [sorted(rows) for rows in seen] == [list(range(60)), list(range(60)), []]
    assert seen[0] != seen[1], "the second epoch has an order of its own"


def with_tensorflow(config: dict[str, Any]) -> tuple[int, list[tuple[int, int]], float]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    groups: list[tuple[int, int]] = []
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, input_shape=(1,))])
    weight = model.variables[0]
    weight.assign([[float(hvd.rank())]])
    state = hvd.elastic.TensorFlowKerasState(model, tf.keras.optimizers.legacy.SGD(), step=0)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def go_on(state: Any) -> None:
        groups.append((hvd.rank(), state.step))
        while state.step < 6:
            if state.step == 3 and hvd.rank() == 0 and once(config["folder"], "killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            weight.assign_add(hvd.allreduce(tf.ones([1, 1]), op=hvd.Sum, name="total"))
            raysgd.report(step=state.step)
            state.step += 1
            state.commit()

    go_on(state)
    return os.getpid(), groups, float(weight.numpy().sum())


def test_with_tensorflow(tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=1, spares=1)
    with make_trainer(tmp_path, 2, horovod(framework="tensorflow"), failure=failure) as trainer:
        returned = trainer.run(with_tensorflow, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
    assert [groups for _, groups, _ in returned] == [[(1, 0), (0, 3)], [(1, 3)]]
    assert [weight for _, _, weight in returned] == [12.0, 12.0]
