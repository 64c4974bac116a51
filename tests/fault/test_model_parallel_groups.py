"""Groups whose workers share replicas of the model: whole copies through deaths, the same rows, sharded checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysgd
from support.runs import PATIENCE_S, events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
travels_by_value(__name__)

NUM_ROWS = 40
ROWS = np.random.default_rng(0).standard_normal((NUM_ROWS, 6)).astype(np.float32)
BATCH = 8


def make_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.GELU(), torch.nn.Linear(12, 1))


def make_optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=0.01)


def shard(model: Any, tensor_parallel: bool) -> Any:
    """Share a model between the ranks of its copy, and each part between the copies."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = raysgd.torch.mesh()
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    return model


def train_sharded(config: dict[str, Any]) -> dict[str, Any]:
    model = shard(make_model(), config["tensor_parallel"])
    optimizer = make_optimizer(model)
    state, step = raysgd.load_checkpoint(), 0
    if state is not None:
        raysgd.torch.restore(state, into={"model": model, "optimizer": optimizer})
        step = state["step"]
    split = raysgd.get_dataset().get_split()
    first, is_small = step, raysgd.world_size() < config["size_at_end"]
    while step < max(config["num_steps"], first + 2) or is_small:
        for batch in split.to_torch(global_batch_size=BATCH, shuffle="full"):
            if step == config["kill_at"] and raysgd.world_rank() == 1 and once(config["folder"], "killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            x = batch["x"]
            error = ((model(x[:, :5]).flatten() - x[:, 5]) ** 2).sum() / BATCH
            (error * raysgd.data_parallel_size()).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            raysgd.report(step=step, error=error.detach(), rows=batch["id"].tolist(), place=raysgd.data_parallel_rank())
            raysgd.save_checkpoint({"model": model, "optimizer": optimizer, "step": step}, all_ranks=True)
            if is_small and step >= config["num_steps"]:
                time.sleep(0.2)  # until the lost worker is replaced
            elif step >= max(config["num_steps"], first + 2):
                break
    return {"size": raysgd.world_size()}


def check_losses(results: list[raysgd.Result], last: raysgd.Checkpoint) -> None:
    """Compare each step's error, and the last checkpoint, with those of the plain loop over the same rows."""
    model = make_model()
    optimizer = make_optimizer(model)
    by_step = {result["step"]: result for result in results}
    assert sorted(by_step) == list(range(1, len(by_step) + 1))
    for step in sorted(by_step):
        of_copies: dict[int, dict[str, Any]] = {}
        for metrics in by_step[step].workers:
            same = of_copies.setdefault(metrics["place"], metrics)
            assert same["rows"] == metrics["rows"], "ranks of one replica of the model read different rows"
        rows = [row for metrics in of_copies.values() for row in metrics["rows"]]
        assert len(rows) == len(set(rows)) == BATCH
        x = torch.from_numpy(ROWS[rows])
        error = ((model(x[:, :5]).flatten() - x[:, 5]) ** 2).sum() / BATCH
        found = sum(metrics["error"] for metrics in of_copies.values())
        assert found == pytest.approx(error.item(), rel=1e-5)
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = last.load()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-4, atol=1e-6)
    assert saved["optimizer"]["state"][0]["exp_avg"].shape == (12, 5)


def run(trainer: raysgd.Trainer, folder: Path, **config: Any) -> list[raysgd.Result]:
    stream = trainer.run_generator(
        train_sharded,
        {"folder": str(folder), "num_steps": 10, "size_at_end": 0, "kill_at": 4, **config},
        dataset={"x": ROWS, "id": np.arange(NUM_ROWS)},
        callbacks=quiet(),
    )
    results = list(stream)
    assert stream.get_returns()["size"] == results[-1]["world_size"]
    checkpoint = trainer.get_last_checkpoint()
    assert checkpoint is not None
    check_losses(results, checkpoint)
    return results


def test_group_keeps_whole_copies_through_a_death_and_grows_back(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs", (2, 4), "torch", workers_per_replica=2) as trainer:
        results = run(trainer, tmp_path, tensor_parallel=True, size_at_end=4)
        sizes = [result["world_size"] for result in results]
        assert sizes[0] == sizes[-1] == 4 and set(sizes) == {2, 4}
        assert len(events_of(trainer, "failure")) == 1


def test_spare_takes_the_place_in_a_copy_of_the_model(ray_cluster: Any, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(num_spares=1)
    with make_trainer(tmp_path / "runs", 4, "torch", workers_per_replica=2, failure_config=failure) as trainer:
        results = run(trainer, tmp_path, tensor_parallel=True)
        assert {result["world_size"] for result in results} == {4} and results[-1]["attempt"] == 2


def test_fsdp_shrinks_to_the_survivors_like_ddp(ray_cluster: Any, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(
        abort_grace_s=20
    )  # on a busy machine the survivors are slow, and all of them shall stay
    with make_trainer(tmp_path / "runs", (2, 5), "torch", failure_config=failure) as trainer:
        results = run(trainer, tmp_path, tensor_parallel=False)
        assert {result["world_size"] for result in results} >= {4, 5}
        died = max(result["timestamp"] for result in results if result["attempt"] == 1)
        assert min(result["timestamp"] for result in results if result["attempt"] == 2) - died < PATIENCE_S
