"""A checkpoint that is cut off while it is written: none, for all who look; what was there before it goes on to serve."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from support.poll import until
from support.runs import PATIENCE_S, controller_pid, latest_run, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.slow, pytest.mark.fault]
travels_by_value(__name__)

PART_BYTES = 200_000_000


def save_and_wait(state: Any) -> None:
    raysgd.save_checkpoint(state, all_ranks=True)
    while raysgd.load_checkpoint() is None:
        time.sleep(0.01)


def dies_in_its_second_save(config: dict[str, Any]) -> Any:
    """Returns the state it went on from; writes down what of the second one was there when rank 1 died."""
    state = raysgd.load_checkpoint()
    if state is None:
        save_and_wait({"step": 1, "rank": raysgd.world_rank()})
    raysgd.save_checkpoint({"step": 2, "weights": np.ones(PART_BYTES, np.uint8)}, all_ranks=True)
    if state is not None:
        return state
    if raysgd.world_rank() == 1:
        while not (begun := begun_by_rank_1(Path(config["checkpoints"]) / "checkpoint_000002")):
            time.sleep(0.001)
        Path(config["seen"]).write_text(json.dumps(begun))
        os.kill(os.getpid(), signal.SIGKILL)
    raysgd.barrier()
    return None


def begun_by_rank_1(folder: Path) -> list[Any]:
    """The name and size of a file that this process is writing; on a local disk it is aside until it is whole."""
    for name in os.listdir(folder) if folder.exists() else []:
        if name.startswith(f".tmp-{os.getpid()}-") or name == "a0001-r00001.safetensors":
            return [name, (folder / name).stat().st_size]
    return []


@pytest.mark.parametrize("scheme", ["", pytest.param("fsspec+file://", marks=pytest.mark.long)])
def test_a_worker_killed_while_it_writes(ray_cluster: Any, tmp_path: Path, scheme: str) -> None:
    run = raysgd.RunConfig(storage_path=f"{scheme}{tmp_path}", name="t")
    checkpoints = tmp_path / "t/run_001/checkpoints"
    config = {"checkpoints": str(checkpoints), "seen": str(tmp_path / "seen")}
    storage_alone = raysgd.CheckpointConfig(keep_in_memory=False)
    with raysgd.Trainer(2, "none", run=run, checkpoint=storage_alone) as trainer:
        found = trainer.run(dies_in_its_second_save, config, callbacks=quiet(), returns="all")
        loaded = latest_run(trainer)
    name, size = json.loads((tmp_path / "seen").read_text())
    assert name.startswith(".tmp-") if scheme == "" else size < PART_BYTES, "it was not in the middle"
    assert found == [{"step": 1, "rank": 0}, {"step": 1, "rank": 1}]
    assert [checkpoint.load(rank=1)["step"] for checkpoint in loaded.checkpoints] == [1, 2]
    whole = {f"a0002-r0000{rank}.{suffix}" for rank in (0, 1) for suffix in ("json", "safetensors")}
    assert set(os.listdir(checkpoints / "checkpoint_000002")) == whole | {"manifest.json"}, "remains of the half one"


@pytest.mark.parametrize("scheme", ["", pytest.param("fsspec+file://", marks=pytest.mark.long)])
def test_memory_may_have_what_it_did_not_write(ray_cluster: Any, tmp_path: Path, scheme: str) -> None:
    """The copy to memory goes on beside the writing, and has ended by then, or not."""
    run = raysgd.RunConfig(storage_path=f"{scheme}{tmp_path}", name="t")
    checkpoints = tmp_path / "t/run_001/checkpoints"
    config = {"checkpoints": str(checkpoints), "seen": str(tmp_path / "seen")}
    with raysgd.Trainer(2, "none", run=run) as trainer:
        found = trainer.run(dies_in_its_second_save, config, callbacks=quiet(), returns="all")
        loaded = latest_run(trainer)
    step = found[0]["step"]
    assert [state["step"] for state in found] == [step, step] and step in (1, 2)
    assert [checkpoint.load(rank=1)["step"] for checkpoint in loaded.checkpoints] == [1, 2] + [2] * (step - 1)
    second = {name for name in os.listdir(checkpoints / "checkpoint_000002") if name != "manifest.json"}
    assert second == {f"a000{3 - step}-r0000{rank}.{end}" for rank in (0, 1) for end in ("json", "safetensors")}


def saves_again_when_told(config: dict[str, Any]) -> Any:
    state = raysgd.load_checkpoint()
    if state is not None:
        return state["step"]
    save_and_wait({"step": 1})
    Path(config["folder"], f"ready-{raysgd.world_rank()}").touch()
    while not Path(config["folder"], "go").exists():
        time.sleep(0.01)
    raysgd.save_checkpoint({"step": 2}, all_ranks=True)
    raysgd.barrier()
    return None


def test_a_controller_killed_between_the_parts_and_the_manifest(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs") as trainer:
        stream = trainer.run_generator(saves_again_when_told, {"folder": str(tmp_path)}, callbacks=quiet())
        assert until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, PATIENCE_S)
        pid, run_dir = controller_pid(), Path(str(stream.run_dir))
        os.kill(pid, signal.SIGSTOP)  # workers write without asking it
        (tmp_path / "go").touch()
        half = run_dir / "checkpoints/checkpoint_000002"
        parts = {"a0001-r00000.json", "a0001-r00001.json"}
        assert until(lambda: half.exists() and set(os.listdir(half)) == parts, PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        assert stream.get_returns() == 1, "it has not gone on from the first checkpoint"
        trainer.get_last_checkpoint()  # waits for what is done after the end
        (last,) = raysgd.load_run(run_dir).checkpoints
        assert last.load()["step"] == 1
        assert not half.exists()
