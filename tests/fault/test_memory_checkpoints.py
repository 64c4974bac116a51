"""Checkpoints in the cluster's memory: runs resume from them, and store the newest one at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from support.poll import until
from support.runs import PATIENCE_S, events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

#: Too large for Ray to inline: it goes to the object store.
SIZE = 1_000_000


def settings(**of_checkpoints: Any) -> dict[str, Any]:
    return {
        "failure_config": raysgd.FailureConfig(max_failures=2),
        "checkpoint_config": raysgd.CheckpointConfig(**of_checkpoints),
        "seed": 1,
    }


TRAINER = settings(storage_interval=1000)


def steps(config: dict[str, Any]) -> dict[str, Any]:
    """Make ten steps, each saved and then reported; one rank dies once, when memory holds the save before."""
    state = raysgd.load_checkpoint() or {"step": 0, "weights": np.zeros(SIZE), "drawn": []}
    begun_at = state["step"]
    while state["step"] < 10:
        state["weights"] += 1
        state["drawn"].append(float(np.random.random()))
        state["step"] += 1
        raysgd.save_checkpoint(state, all_ranks=config.get("all_ranks", False))
        raysgd.report(step=state["step"])
        if state["step"] == 6 and raysgd.world_rank() == config["dies"] and once(config["folder"], "died"):
            time.sleep(config.get("pause_s", 3.0))  # copies are made in the background
            os.kill(os.getpid(), signal.SIGKILL)
        if state["step"] == 7:
            raysgd.barrier()  # no rank is far ahead of the one that dies
    return {"begun_at": begun_at, "weight": float(state["weights"].mean()), "drawn": state["drawn"]}


def checkpoints_of(trainer: raysgd.Trainer) -> list[str]:
    return sorted(path.name for path in Path(str(trainer.run_dir), "checkpoints").glob("checkpoint_*"))


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("all_ranks", [False, True], ids=["whole", "parts"])
def test_run_resumes_from_memory_without_a_checkpoint_on_storage(
    trainer: raysgd.Trainer, tmp_path: Path, dies: int, all_ranks: bool
) -> None:
    calm = trainer.run(steps, {"dies": None, "folder": "", "all_ranks": all_ranks}, callbacks=quiet(), returns="all")
    assert [value["weight"] for value in calm] == [10.0, 10.0]

    config = {"dies": dies, "folder": str(tmp_path), "all_ranks": all_ranks}
    values = trainer.run(steps, config, callbacks=quiet(), returns="all")
    begins = [value["begun_at"] for value in values]
    assert begins[0] == begins[1] > 0  # the step depends on the copy, and on how far the other rank was ahead
    assert [value["weight"] for value in values] == [10.0, 10.0]
    after = [value["drawn"][begins[0] :] for value in values]
    assert after == [value["drawn"][begins[0] :] for value in calm], "another random sequence"

    first, second = events_of(trainer, "attempt_start")
    assert (first["memory"], second["memory"], second["checkpoint"]) == (None, begins[0], None)
    assert len(events_of(trainer, "failure")) == 1

    # The newest checkpoint was only in memory, and is written when the run ends.
    (name,) = checkpoints_of(trainer)
    path = f"{trainer.run_dir}/checkpoints/{name}"
    assert raysgd.load_checkpoint(path)["step"] == 10
    assert raysgd.Checkpoint.from_path(path).iteration == 10


def test_newest_save_is_written_when_the_run_fails(trainer: raysgd.Trainer) -> None:
    def fails() -> None:
        for step in range(3):
            raysgd.save_checkpoint({"step": step})
            raysgd.report(step=step)
        raysgd.barrier()  # both ranks made all saves
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        trainer.run(fails, callbacks=quiet())
    assert until(lambda: len(checkpoints_of(trainer)) == 1, PATIENCE_S)
    (name,) = checkpoints_of(trainer)
    assert until(lambda: Path(f"{trainer.run_dir}/checkpoints/{name}/manifest.json").exists(), PATIENCE_S)
    assert raysgd.load_checkpoint(f"{trainer.run_dir}/checkpoints/{name}") == {"step": 2}


def test_storage_interval_decides_which_saves_are_written(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, **settings(storage_interval=4)) as trainer:
        value = trainer.run(steps, {"dies": None, "folder": ""}, callbacks=quiet())
        assert value["weight"] == 10.0
        assert checkpoints_of(trainer) == ["checkpoint_000004", "checkpoint_000008", "checkpoint_000010"]


def test_resume_from_memory_does_not_read_storage(ray_cluster: Any, tmp_path: Path) -> None:
    """A committed checkpoint is read from memory, so that recovery works while storage is unavailable."""

    def train_func(config: dict[str, Any]) -> int:
        state = raysgd.load_checkpoint()
        if state is not None:
            return int(state["step"])
        for _ in range(3):  # the third save waits for a buffer, so the first is in memory by then
            raysgd.save_checkpoint({"step": 3, "weights": np.ones(SIZE)})
        while not os.path.exists(f"{config['checkpoints']}/checkpoint_000003/manifest.json"):
            time.sleep(0.01)  # a write in progress would fail and end the run
        raysgd.barrier()
        if raysgd.world_rank() == 1:
            shutil.rmtree(config["checkpoints"])
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return -1

    with make_trainer(tmp_path, **settings()) as trainer:
        trainer.run(lambda: None, callbacks=quiet())  # creates the folder of the next run
        folder = Path(str(trainer.run_dir))
        config = {"checkpoints": str(folder.with_name("run_002") / "checkpoints")}
        assert trainer.run(train_func, config, callbacks=quiet()) == 3


def test_run_resumes_from_storage_without_keep_in_memory(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs", **settings(keep_in_memory=False)) as trainer:
        values = trainer.run(steps, {"dies": 1, "folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        assert [value["weight"] for value in values] == [10.0, 10.0]
        second = events_of(trainer, "attempt_start")[1]
        assert second["memory"] is None and second["checkpoint"] is not None


NUM_ROWS = 16


def train_sharded(config: dict[str, Any]) -> dict[str, Any]:
    """Make ten steps with FSDP, and log at each save what this rank holds; rank 1 dies once after the sixth."""
    import torch

    engine = raysgd.Engine(zero_stage=3)
    model, log = make_network(), Path(config["folder"])
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    saved, rank = engine.load_checkpoint(), raysgd.world_rank()
    begun_at = step = 0 if saved is None else saved["step"]
    restored = None if saved is None else shards_of(model, optimizer)
    loss = None
    while step < 10:
        loss = loss_of(model, torch.arange(rank, NUM_ROWS, 2))
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if saved is None:
            Path(log, f"{step}-{rank}").write_text(json.dumps(shards_of(model, optimizer)))
        engine.save_checkpoint(step=step)
        raysgd.report(step=step, loss=loss.detach())
        if step == 6 and rank == 1 and once(config["folder"], "died"):
            time.sleep(3.0)  # copies are made in the background
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 7:
            raysgd.barrier()  # no rank is far ahead of the one that dies
    return {"begun_at": begun_at, "restored": restored}


def make_network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))


def loss_of(model: Any, rows: Any) -> Any:
    import torch

    x = torch.randn(NUM_ROWS, 8, generator=torch.Generator().manual_seed(1))
    return (model(x[rows]) - x[rows, :1]).square().mean()


def shards_of(model: Any, optimizer: Any) -> list[tuple[int, float]]:
    """Return the numbers of elements and the sums of this rank's shards of parameters and of the optimizer's state."""
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items()) if value.ndim]
    local = [tensor.detach().to_local() for tensor in (*model.parameters(), *states)]
    return [(tensor.numel(), float(tensor.double().sum())) for tensor in local]


def test_each_rank_restores_its_shards_of_a_torch_model_from_memory(ray_cluster: Any, tmp_path: Path) -> None:
    import torch

    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = loss_of(model, torch.arange(NUM_ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with make_trainer(tmp_path / "runs", 2, "torch", **settings(storage_interval=1000)) as trainer:
        config = {"folder": str(tmp_path)}
        stream = trainer.run_generator(train_sharded, config, callbacks=quiet(), returns="all", reduce={"loss": "mean"})
        found = {result["step"]: result["loss"] for result in stream}
        returned = stream.get_returns()
        _, second = events_of(trainer, "attempt_start")
        assert len(checkpoints_of(trainer)) == 1, "not only the last checkpoint was on storage"
    begun_at = returned[0]["begun_at"]
    assert (second["memory"], second["checkpoint"]) == (begun_at, None) and begun_at > 0
    num_elements = 3 * sum(each.numel() for each in model.parameters())  # AdamW has two values of each
    for rank, value in enumerate(returned):
        held = json.loads(Path(tmp_path, f"{begun_at}-{rank}").read_text())
        assert [tuple(each) for each in held] == value["restored"], f"rank {rank} has other shards"
        assert sum(number for number, _ in held) == num_elements // 2
    assert returned[0]["restored"] != returned[1]["restored"]
    assert list(found.values()) == pytest.approx(losses, rel=1e-5)
