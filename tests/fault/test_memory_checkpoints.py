"""Checkpoints in the cluster's memory: runs resume from them, and store the newest one at the end."""

from __future__ import annotations

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
            time.sleep(config.get("pause_s", 1.0))  # copies are made in the background
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
