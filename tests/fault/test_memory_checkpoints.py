"""Checkpoints in the cluster's memory: a run goes on from them after a death, and writes the newest to storage at its end."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from support.poll import until
from support.runs import PATIENCE_S, events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

#: Too large for Ray to keep it beside the object store.
SIZE = 1_000_000


@pytest.fixture(scope="module")
def trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    with memory_trainer(tmp_path_factory.mktemp("runs"), memory_only_between=1000) as trainer:
        yield trainer


def memory_trainer(folder: Path, **settings: Any) -> raysgd.Trainer:
    return make_trainer(
        folder,
        failure=raysgd.FailureConfig(max_failures=2),
        checkpoint=raysgd.CheckpointConfig(**settings),
        seed=1,
    )


def steps(config: dict[str, Any]) -> dict[str, Any]:
    """Ten steps, each saved and then reported; the rank to die does so once, when memory has the save before."""
    state = raysgd.load_checkpoint() or {"step": 0, "weights": np.zeros(SIZE), "drawn": []}
    begun_at = state["step"]
    while state["step"] < 10:
        state["weights"] += 1
        state["drawn"].append(float(np.random.random()))
        state["step"] += 1
        raysgd.save_checkpoint(state, all_ranks=config.get("all_ranks", False))
        raysgd.report(step=state["step"])
        if state["step"] == 6 and raysgd.world_rank() == config["dies"] and once(config["folder"], "died"):
            time.sleep(config.get("pause_s", 1.0))  # the copies are taken behind the training
            os.kill(os.getpid(), signal.SIGKILL)
        if state["step"] == 7:
            raysgd.barrier()  # nobody is far ahead of the one that dies
    return {"begun_at": begun_at, "weight": float(state["weights"].mean()), "drawn": state["drawn"]}


def checkpoints_of(trainer: raysgd.Trainer) -> list[str]:
    return sorted(path.name for path in Path(str(trainer.run_dir), "checkpoints").glob("checkpoint_*"))


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("all_ranks", [False, True], ids=["whole", "parts"])
def test_a_run_goes_on_from_memory_with_no_checkpoint_on_storage(
    trainer: raysgd.Trainer, tmp_path: Path, dies: int, all_ranks: bool
) -> None:
    calm = trainer.run(steps, {"dies": None, "folder": "", "all_ranks": all_ranks}, callbacks=quiet(), returns="all")
    assert [value["weight"] for value in calm] == [10.0, 10.0]

    config = {"dies": dies, "folder": str(tmp_path), "all_ranks": all_ranks}
    values = trainer.run(steps, config, callbacks=quiet(), returns="all")
    begins = [value["begun_at"] for value in values]
    assert begins[0] == begins[1] > 0  # how many behind depends on the copy, and on how far the other rank was ahead
    assert [value["weight"] for value in values] == [10.0, 10.0]
    after = [value["drawn"][begins[0] :] for value in values]
    assert after == [value["drawn"][begins[0] :] for value in calm], "another random sequence"

    first, second = events_of(trainer, "attempt_start")
    assert (first["memory"], second["memory"], second["checkpoint"]) == (None, begins[0], None)
    assert len(events_of(trainer, "failure")) == 1

    # The newest was in memory alone, and is written when the run ends.
    (name,) = checkpoints_of(trainer)
    path = f"{trainer.run_dir}/checkpoints/{name}"
    assert raysgd.load_checkpoint(path)["step"] == 10
    assert raysgd.Checkpoint.from_path(path).iteration == 10


def test_where_a_run_ends_in_an_error_its_newest_save_is_written(trainer: raysgd.Trainer) -> None:
    def fails() -> None:
        for step in range(3):
            raysgd.save_checkpoint({"step": step})
            raysgd.report(step=step)
        raysgd.barrier()  # both have made all saves
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        trainer.run(fails, callbacks=quiet())
    assert until(lambda: len(checkpoints_of(trainer)) == 1, PATIENCE_S)
    (name,) = checkpoints_of(trainer)
    assert until(lambda: Path(f"{trainer.run_dir}/checkpoints/{name}/manifest.json").exists(), PATIENCE_S)
    assert raysgd.load_checkpoint(f"{trainer.run_dir}/checkpoints/{name}") == {"step": 2}


def test_every_so_many_th_save_goes_to_storage(ray_cluster: Any, tmp_path: Path) -> None:
    with memory_trainer(tmp_path, memory_only_between=4) as trainer:
        value = trainer.run(steps, {"dies": None, "folder": ""}, callbacks=quiet())
        assert value["weight"] == 10.0
        assert checkpoints_of(trainer) == ["checkpoint_000004", "checkpoint_000008", "checkpoint_000010"]


def test_storage_that_was_lost_is_not_asked_for(ray_cluster: Any, tmp_path: Path) -> None:
    """What was committed is read from memory as well: a storage that went away does not stop a recovery."""

    def train_func(config: dict[str, Any]) -> int:
        state = raysgd.load_checkpoint()
        if state is not None:
            return int(state["step"])
        for _ in range(3):  # the third waits for a buffer: the first has been taken into memory by then
            raysgd.save_checkpoint({"step": 3, "weights": np.ones(SIZE)})
        while not os.path.exists(f"{config['checkpoints']}/checkpoint_000003/manifest.json"):
            time.sleep(0.01)  # a write that is under way would fail, and end the run
        raysgd.barrier()
        if raysgd.world_rank() == 1:
            shutil.rmtree(config["checkpoints"])
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return -1

    with memory_trainer(tmp_path) as trainer:
        trainer.run(lambda: None, callbacks=quiet())  # tells where the next run's folder will be
        folder = Path(str(trainer.run_dir))
        config = {"checkpoints": str(folder.with_name("run_002") / "checkpoints")}
        assert trainer.run(train_func, config, callbacks=quiet()) == 3


def test_without_memory_a_run_goes_on_from_storage(ray_cluster: Any, tmp_path: Path) -> None:
    with memory_trainer(tmp_path / "runs", keep_in_memory=False) as trainer:
        values = trainer.run(steps, {"dies": 1, "folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        assert [value["weight"] for value in values] == [10.0, 10.0]
        second = events_of(trainer, "attempt_start")[1]
        assert second["memory"] is None and second["checkpoint"] is not None
