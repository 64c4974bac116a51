"""A worker with a piece of the state is killed: training continues from a replica, or from memory copies, to the same bits."""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.session import context
from support.row_log import rows_that_count
from support.runs import events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

NUM_WORKERS = 4
NUM_ROWS = 160
BATCH = 2
NUM_STEPS = NUM_ROWS // NUM_WORKERS // BATCH
DIES_AT = 15


def build(sharding: str) -> tuple[Any, Any, Any]:
    """Return a model and its optimizer, distributed over the ranks, and the group whose ranks train on the same rows, or None.

    With "hybrid" and "tensor and replicas", another rank holds each piece.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    width = 32 if "tensor" in sharding else 33  # shards of different sizes, one of them empty
    layers = torch.nn.Linear(4, width), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(width, 1)
    model: Any = torch.nn.Sequential(*layers)
    torch.manual_seed(raysgd.world_rank())
    if sharding == "zero":
        model = raysgd.torch.prepare_model(model)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05), None
    size = raysgd.world_size()
    dims = {"hybrid": (2, 2, 1), "tensor and replicas": (2, 1, 2), "fsdp": (1, size, 1), "tensor and fsdp": (1, 2, 2)}
    mesh = init_device_mesh("cpu", dims[sharding], mesh_dim_names=("replicas", "shards", "tensor"))
    if mesh["tensor"].size() > 1:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    data_parallel = mesh["replicas", "shards"] if mesh["replicas"].size() > 1 else mesh["shards"]
    fully_shard(model[0], mesh=data_parallel)
    fully_shard(model, mesh=data_parallel)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05), mesh["tensor"].get_group()


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model with dropout; ranks die once, at a moment of step `DIES_AT`."""
    import torch

    model, optimizer, tensor_group = build(config["sharding"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    live = raysgd.live_state(model=model, optimizer=optimizer, scheduler=scheduler)
    state = raysgd.load_checkpoint()
    step = 0
    if state is not None:
        live.load_state_dict(state)
        step = state["step"]

    def die(moment: str) -> None:
        rank = raysgd.world_rank()
        is_due = moment == config["moment"] and step == DIES_AT - 1 and rank in config["ranks"]
        if is_due and once(config["folder"], f"died-{rank}"):
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_pre_hook(lambda *args: die("before the optimizer's step"))
    optimizer.register_step_post_hook(lambda *args: die("after the optimizer's step"))
    log = Path(config["folder"], f"{context.installed().attempt}-{step}-{raysgd.world_rank()}")
    for batch in raysgd.get_dataset().get_split().to_torch(batch_size=BATCH, shuffle="full"):
        with log.open("a") as file:
            file.writelines(f"{step + 1} 0 {row}\n" for row in batch["row"].tolist())
        if tensor_group is not None:
            for values in batch.values():
                torch.distributed.broadcast(values, group=tensor_group, group_src=0)
        loss = (model(batch["x"].float()) - batch["row"][:, None]).square().mean()
        die("after the forward pass")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        raysgd.report(step=step)
        live.step(step=step)
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    return {"step": step, "tensors": {name: tensor.detach().numpy() for name, tensor in whole.items()}}


def data() -> dict[str, Any]:
    return {"x": np.random.default_rng(0).normal(size=(NUM_ROWS, 4)), "row": np.arange(NUM_ROWS)}


TRAINER = {
    "num_workers": NUM_WORKERS,
    "backend": "torch",
    # A loaded machine needs long until the survivors have left.
    "failure_config": raysgd.FailureConfig(max_failures=3, num_spares=1, abort_grace_s=60),
    "seed": 3,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def calm(trainer: raysgd.Trainer, tmp_path_factory: Any) -> Callable[[str], dict[str, Any]]:
    """Returns the value of an undisturbed run, by how the state is divided."""

    @functools.cache
    def run(sharding: str) -> dict[str, Any]:
        config = {"sharding": sharding, "moment": "", "ranks": [], "folder": str(tmp_path_factory.mktemp("calm"))}
        return trainer.run(train, config, dataset=data(), callbacks=quiet())

    return run


def check_result(value: dict[str, Any], calm: dict[str, Any], folder: Path) -> None:
    assert value["step"] == calm["step"] == NUM_STEPS
    for name, tensor in calm["tensors"].items():
        assert np.array_equal(tensor, value["tensors"][name]), f"{name} differs"
    assert rows_that_count(folder) == Counter({(0, row): 1 for row in range(NUM_ROWS)})


AFTER_PASS, BEFORE_STEP, AFTER_STEP = (
    "after the forward pass",
    "before the optimizer's step",
    "after the optimizer's step",
)


@pytest.mark.parametrize(
    ("sharding", "moment"),
    [("hybrid", AFTER_PASS), ("hybrid", BEFORE_STEP), ("hybrid", AFTER_STEP), ("tensor and replicas", AFTER_PASS)],
)
def test_new_rank_gets_its_piece_from_a_replica(
    trainer: raysgd.Trainer, calm: Callable[[str], dict[str, Any]], tmp_path: Path, sharding: str, moment: str
) -> None:
    config = {"sharding": sharding, "moment": moment, "ranks": [1], "folder": str(tmp_path)}
    value = trainer.run(train, config, dataset=data(), callbacks=quiet())
    first, second = events_of(trainer, "attempt_start")
    assert first["live"] is None
    assert second["live"][1] >= DIES_AT - 1 and (second["checkpoint"], second["memory"]) == (None, None)
    (continued,) = events_of(trainer, "continued")
    assert (continued["ranks"], continued["num_repeated"]) == ([1], 1)
    assert "from the memory of ranks 0, " in continued["why"]
    check_result(value, calm(sharding), tmp_path)


@pytest.mark.parametrize(
    ("sharding", "moment"),
    [("fsdp", AFTER_PASS), ("fsdp", AFTER_STEP), ("tensor and fsdp", AFTER_PASS), ("zero", AFTER_STEP)],
)
def test_pieces_without_replicas_are_copied_in_memory(
    trainer: raysgd.Trainer, calm: Callable[[str], dict[str, Any]], tmp_path: Path, sharding: str, moment: str
) -> None:
    config = {"sharding": sharding, "moment": moment, "ranks": [1, 2], "folder": str(tmp_path)}
    value = trainer.run(train, config, dataset=data(), callbacks=quiet())
    second = events_of(trainer, "attempt_start")[1]
    assert second["live"] is not None and (second["checkpoint"], second["memory"]) == (None, None)
    continued = events_of(trainer, "continued")[0]
    assert 1 <= continued["num_repeated"] <= DIES_AT
    assert "from memory copies" in continued["why"] and "nothing read from storage" in continued["why"]
    check_result(value, calm(sharding), tmp_path)


def test_smaller_group_continues_from_memory_copies(ray_cluster: Any, tmp_path: Path) -> None:
    """Shards that were copied in memory are loaded by another number of ranks."""
    folder = tmp_path / "log"
    folder.mkdir()
    failure = raysgd.FailureConfig(max_failures=1, abort_grace_s=60)
    with make_trainer(tmp_path / "runs", (2, 3), "torch", failure_config=failure, seed=3) as trainer:
        config = {"sharding": "fsdp", "moment": AFTER_PASS, "ranks": [1], "folder": str(folder)}
        trainer.run(train, config, dataset=data(), callbacks=quiet())
        first, second = events_of(trainer, "attempt_start")[:2]
    assert (first["world_size"], first["live"]) == (3, None)
    assert (second["world_size"], second["checkpoint"], second["memory"]) == (2, None, None)
    assert second["live"] is not None
    assert rows_that_count(folder) == Counter({(0, row): 1 for row in range(NUM_ROWS)})
