"""A checkpoint whose write is cut off does not exist for any reader; the one before stays the newest."""

from __future__ import annotations

import contextlib
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

pytestmark = pytest.mark.fault
travels_by_value(__name__)

PART_BYTES = 200_000_000


def save_and_wait(state: Any) -> None:
    raysgd.save_checkpoint(state, all_ranks=True)
    while raysgd.load_checkpoint() is None:
        time.sleep(0.01)


def die_in_second_save(config: dict[str, Any]) -> Any:
    """Return the state that the run resumed from; record which files of the second checkpoint existed at the death."""
    state = raysgd.load_checkpoint()
    if state is None:
        save_and_wait({"step": 1, "rank": raysgd.world_rank()})
    raysgd.save_checkpoint({"step": 2, "weights": np.ones(PART_BYTES, np.uint8)}, all_ranks=True)
    if state is not None:
        return state
    if raysgd.world_rank() == 1:
        while not (begun := file_in_writing(Path(config["checkpoints"]) / "checkpoint_000002")):
            time.sleep(0.001)
        Path(config["seen"]).write_text(json.dumps(begun))
        os.kill(os.getpid(), signal.SIGKILL)
    raysgd.barrier()
    return None


def file_in_writing(folder: Path) -> list[Any]:
    """Return the name and size of the file that this process is writing; a local file has a temporary name until then."""
    for name in os.listdir(folder) if folder.exists() else []:
        if name.startswith(f".tmp-{os.getpid()}-") or name == "a0001-r00001.safetensors":
            with contextlib.suppress(FileNotFoundError):  # it got its name meanwhile
                return [name, (folder / name).stat().st_size]
    return []


@pytest.mark.parametrize("scheme", ["", "fsspec+file://"])
def test_half_written_checkpoint_of_a_killed_worker_is_replaced(ray_cluster: Any, tmp_path: Path, scheme: str) -> None:
    run = raysgd.RunConfig(storage_path=f"{scheme}{tmp_path}", name="t")
    checkpoints = tmp_path / "t/run_001/checkpoints"
    config = {"checkpoints": str(checkpoints), "seen": str(tmp_path / "seen")}
    storage_alone = raysgd.CheckpointConfig(keep_in_memory=False)
    with raysgd.Trainer(2, "none", run_config=run, checkpoint_config=storage_alone) as trainer:
        found = trainer.run(die_in_second_save, config, callbacks=quiet(), returns="all")
        loaded = latest_run(trainer)
    name, size = json.loads((tmp_path / "seen").read_text())
    is_in_the_middle = name.startswith(".tmp-") if scheme == "" else size < PART_BYTES
    assert is_in_the_middle
    assert found == [{"step": 1, "rank": 0}, {"step": 1, "rank": 1}]
    assert [checkpoint.load(rank=1)["step"] for checkpoint in loaded.checkpoints] == [1, 2]
    whole = {f"a0002-r0000{rank}.{suffix}" for rank in (0, 1) for suffix in ("json", "safetensors")}
    assert set(os.listdir(checkpoints / "checkpoint_000002")) == whole | {"manifest.json"}, "remains of the half one"


def test_killed_worker_save_is_written_from_memory_if_it_was_copied(ray_cluster: Any, tmp_path: Path) -> None:
    """The copy to memory runs during the write, and may or may not be complete at the death."""
    run = raysgd.RunConfig(storage_path=tmp_path, name="t")
    checkpoints = tmp_path / "t/run_001/checkpoints"
    config = {"checkpoints": str(checkpoints), "seen": str(tmp_path / "seen")}
    with raysgd.Trainer(2, "none", run_config=run) as trainer:
        found = trainer.run(die_in_second_save, config, callbacks=quiet(), returns="all")
        loaded = latest_run(trainer)
    step = found[0]["step"]
    assert [state["step"] for state in found] == [step, step] and step in (1, 2)
    assert [checkpoint.load(rank=1)["step"] for checkpoint in loaded.checkpoints] == [1, 2] + [2] * (step - 1)
    second = {name for name in os.listdir(checkpoints / "checkpoint_000002") if name != "manifest.json"}
    assert second == {f"a000{3 - step}-r0000{rank}.{end}" for rank in (0, 1) for end in ("json", "safetensors")}


def saves_again_when_file_exists(config: dict[str, Any]) -> Any:
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


def test_checkpoint_without_manifest_is_swept_after_controller_death(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs") as trainer:
        stream = trainer.run_generator(saves_again_when_file_exists, {"folder": str(tmp_path)}, callbacks=quiet())
        assert until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, PATIENCE_S)
        pid, run_dir = controller_pid(), Path(str(stream.run_dir))
        os.kill(pid, signal.SIGSTOP)  # workers write without the controller
        (tmp_path / "go").touch()
        half = run_dir / "checkpoints/checkpoint_000002"
        parts = {"a0001-r00000.json", "a0001-r00001.json"}
        assert until(lambda: half.exists() and set(os.listdir(half)) == parts, PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        assert stream.get_returns() == 1, "it did not resume from the first checkpoint"
        trainer.get_last_checkpoint()  # waits for the work after the end of the run
        (last,) = raysgd.load_run(run_dir).checkpoints
        assert last.load()["step"] == 1
        assert not half.exists()
