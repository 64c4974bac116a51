"""Batches for JAX and TensorFlow in real workers: a run resumes inside an epoch, and no row comes twice."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.errors import UsageError
from support.runs import events_of, make_trainer, once, pids, quiet, travels_by_value

travels_by_value(__name__)


def read_and_save(config: dict[str, Any]) -> list[int]:
    """Read two rows a step and save after each step; leave the loop after ``config["stop_after"]`` steps, if given."""
    shard = raysgd.get_dataset().get_split()
    raysgd.load_checkpoint()
    seen: list[int] = []
    for step, batch in enumerate(shard.to_jax(2, shuffle="window"), 1):
        seen += np.asarray(batch["x"]).tolist()
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
        if step == config.get("stop_after"):
            break
    return seen


def test_run_over_batches_for_jax_resumes_inside_an_epoch(ray_cluster: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    given: dict[str, Any] = {"dataset": {"x": np.arange(23)}, "callbacks": quiet(), "returns": "all"}
    with make_trainer(tmp_path) as trainer:
        first = trainer.run(read_and_save, {"stop_after": 3}, **given)
        checkpoint = trainer.get_last_checkpoint()
    with make_trainer(tmp_path, 1) as trainer:
        second = trainer.run(read_and_save, {}, resume_from=checkpoint, **given)
    assert [len(seen) for seen in (*first, *second)] == [6, 6, 11]
    assert sorted(row for seen in (*first, *second) for row in seen) == list(range(23))


def read_one_ahead(config: dict[str, Any]) -> list[int]:
    """Train on one batch after the next one is read; leave the loop after ``config["stop_after"]`` steps, if given."""
    import torch

    model: Any = torch.nn.Linear(1, 1)
    save: Any = lambda: raysgd.save_checkpoint({})  # noqa: E731
    if config["prepared_by"] == "engine":
        engine = raysgd.Engine(accumulation_steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
        engine.load_checkpoint()
        save = engine.save_checkpoint
    else:
        raysgd.load_checkpoint()
        model = raysgd.torch.prepare_model(model)
    batches = iter(raysgd.get_dataset().get_split().to_torch(2, shuffle="window"))
    seen: list[int] = []
    step, ahead = 0, next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        loss = (
            model(batch["x"][:, None].float()).square().sum() if config["changes"] else model(batch["x"]).square().sum()
        )
        if config["prepared_by"] == "engine":
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss.backward()
        seen += batch["x"].flatten().tolist()
        save()
        step += 1
        if step == config.get("stop_after"):
            break
    return seen


@pytest.mark.parametrize("prepared_by", ["engine", "prepare_model"])
def test_rows_that_were_read_ahead_come_again_on_another_number_of_workers(
    ray_cluster: Any, tmp_path: Path, prepared_by: str
) -> None:
    given: dict[str, Any] = {"callbacks": quiet(), "returns": "all"}
    given["dataset"] = {"x": np.arange(23, dtype=np.float32)[:, None]}
    config = {"prepared_by": prepared_by, "changes": False}
    with make_trainer(tmp_path, backend="torch") as trainer:
        first = trainer.run(read_one_ahead, {**config, "stop_after": 3}, **given)
        checkpoint = trainer.get_last_checkpoint()
        changed = {**given, "dataset": {"x": np.arange(23)}}
        with pytest.raises(UsageError, match=r"set_read_ahead\(num_batches\)"):
            trainer.run(read_one_ahead, {**config, "changes": True}, **changed)
    with make_trainer(tmp_path, 1, backend="torch") as trainer:
        second = trainer.run(read_one_ahead, config, resume_from=checkpoint, **given)
    assert [len(seen) for seen in (*first, *second)] == [6, 6, 11]
    assert sorted(row for seen in (*first, *second) for row in seen) == list(range(23))


def read_and_die_once(config: dict[str, Any]) -> list[int]:
    """Save the rows seen so far; rank 1 dies in the middle, while TensorFlow reads the data of rank 0."""
    state = raysgd.load_checkpoint() or {"seen": []}
    for batch in raysgd.get_dataset().get_split().to_tf(2, shuffle="window"):
        state["seen"] += batch["x"].numpy().tolist()
        raysgd.save_checkpoint(state, all_ranks=True)
        raysgd.report(seen=len(state["seen"]))
        time.sleep(0.05)
        if raysgd.world_rank() == 1 and len(state["seen"]) >= 20 and once(config["folder"], "death"):
            os.kill(os.getpid(), signal.SIGKILL)
    return list(state["seen"])


def test_worker_death_ends_a_tensorflow_loop_of_another_worker(ray_cluster: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    failure = raysgd.FailureConfig(max_failures=1, abort_grace_s=20)
    with make_trainer(tmp_path / "runs", failure_config=failure) as trainer:
        before = pids(trainer)
        config = {"folder": str(tmp_path)}
        given: dict[str, Any] = {"dataset": {"x": np.arange(120)}, "callbacks": quiet(), "returns": "all"}
        seen = trainer.run(read_and_die_once, config, **given)
        assert len(events_of(trainer, "failure")) == 1
        after = pids(trainer)
        assert after[0] == before[0] and after[1] != before[1], "the survivor did not leave its loop"
    assert sorted(row for of_rank in seen for row in of_rank) == list(range(120))
