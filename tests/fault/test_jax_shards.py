"""A worker with shards of a model dies: the survivors resume with all shards, from memory or from storage."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from support.runs import events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
travels_by_value(__name__)
ROWS = 12
STEPS = 8


def steps(config: dict[str, Any]) -> dict[str, Any]:
    """Add one to each row in each step; the state has shards on all workers."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    by_rows = NamedSharding(raysgd.jax.mesh(), PartitionSpec("data"))
    start = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    rows = jax.make_array_from_callback(start.shape, by_rows, lambda index: start[index])
    state = {"rows": rows, "step": 0}
    if saved := raysgd.load_checkpoint():
        state = raysgd.jax.restore(saved, like=state)
    begun_at, sizes = state["step"], raysgd.world_size()
    add = jax.jit(lambda rows: rows + 1, donate_argnums=0)  # the next step overwrites the saved arrays
    while state["step"] < STEPS:
        state = {"rows": add(state["rows"]), "step": state["step"] + 1}
        raysgd.save_checkpoint(state, all_ranks=True)
        raysgd.report(step=state["step"])
        if state["step"] == 5 and raysgd.world_rank() == config["dies"] and once(config["folder"], "died"):
            wait_for_saves(Path(config["folder"]), config["is_on_storage"])
            if config.get("damages"):
                damage(Path(config["folder"]))
            os.kill(os.getpid(), signal.SIGKILL)
        if state["step"] == 6:
            raysgd.barrier()  # no rank is far ahead of the one that dies
    end = {str(shard.index): np.asarray(shard.data) for shard in state["rows"].addressable_shards}
    right = all((shard.data == (start + STEPS)[shard.index]).all() for shard in state["rows"].addressable_shards)
    return {"begun_at": begun_at, "size": sizes, "right": right, "num_shards": len(end)}


def wait_for_saves(folder: Path, is_on_storage: bool) -> None:
    """Wait until the save is on storage; copies in memory cannot be observed."""
    if is_on_storage:
        while len(list(folder.rglob("manifest.json"))) < 5:
            time.sleep(0.01)
    else:
        time.sleep(3.0)


def damage(folder: Path) -> None:
    """Change a byte of the last part of the newest checkpoint."""
    *_, newest = sorted(path.parent for path in folder.rglob("manifest.json"))
    *_, file = sorted(newest.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["memory", "storage"])
@pytest.mark.parametrize("num_workers", [2, (2, 3)], ids=["replaced", "smaller"])
def test_survivors_resume_with_the_whole_sharded_array(
    ray_cluster: Any, tmp_path: Path, num_workers: Any, is_in_memory: bool
) -> None:
    dies = 1 if num_workers == 2 else 2  # the group does not wait for a rank beyond the minimum
    config = {"folder": str(tmp_path), "dies": dies, "is_on_storage": not is_in_memory}
    kept = raysgd.CheckpointConfig(keep_in_memory=is_in_memory, storage_interval=1000 if is_in_memory else 1)
    with make_trainer(tmp_path, num_workers, "jax", checkpoint_config=kept) as trainer:
        ended = trainer.run(steps, config, callbacks=quiet(), returns="all")
        begins, resizes = events_of(trainer, "attempt_start"), events_of(trainer, "resize")
    assert all(each["right"] for each in ended)
    assert begins[1]["iterations_before"] in (range(1, 6) if is_in_memory else [5])
    assert (begins[1]["memory"] is not None) == is_in_memory
    assert (begins[1]["checkpoint"] is None) == is_in_memory
    if num_workers != 2:
        assert resizes[0] == {"old": 3, "new": 2}


def test_damaged_shard_falls_back_to_the_checkpoint_before(ray_cluster: Any, tmp_path: Path) -> None:
    config = {"folder": str(tmp_path), "dies": 0, "is_on_storage": True, "damages": True}
    kept = raysgd.CheckpointConfig(keep_in_memory=False)
    with make_trainer(tmp_path, 2, "jax", checkpoint_config=kept) as trainer:
        ended = trainer.run(steps, config, callbacks=quiet(), returns="all")
        warnings = [each["message"] for each in events_of(trainer, "warning")]
    assert all(each["right"] for each in ended)
    assert any(" skipped: " in message and "checksum" in message for message in warnings), warnings
