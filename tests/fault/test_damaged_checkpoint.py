"""The newest checkpoint is damaged on storage: recovery skips it and resumes from the one before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import CheckpointCorruptError
from support.runs import PATIENCE_S, events_of, once, quiet, travels_by_value

pytestmark = pytest.mark.fault
travels_by_value(__name__)


def damage(checkpoint: Path) -> None:
    """Change one byte of one file."""
    (path,) = checkpoint.glob("a*.json")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def steps(config: dict[str, Any]) -> int:
    """Make six steps, each saved; in step 3 rank 1 damages the newest checkpoints and dies."""
    state = raysgd.load_checkpoint() or {"step": 0}
    begun_at = int(state["step"])
    for step in range(begun_at, 6):
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step + 1})
        raysgd.barrier()
        if step == 3 and raysgd.world_rank() == 1 and once(config["folder"], "damaged"):
            newest = Path(config["checkpoints"])
            deadline = time.monotonic() + PATIENCE_S
            while not (newest / "checkpoint_000004/manifest.json").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            for number in config["damaged"]:
                damage(newest / f"checkpoint_{number:06d}")
            os.kill(os.getpid(), signal.SIGKILL)
    return begun_at


@pytest.mark.parametrize(("damaged", "begun_at"), [((4,), 3), ((4, 3), 2)])
def test_recovery_skips_a_damaged_checkpoint(
    ray_cluster: Any, tmp_path: Path, damaged: tuple[int, ...], begun_at: int
) -> None:
    run = raysgd.RunConfig(name="r", storage_path=str(tmp_path))
    config = {"folder": str(tmp_path), "checkpoints": str(tmp_path / "r/run_001/checkpoints"), "damaged": damaged}
    storage_alone = raysgd.CheckpointConfig(keep_in_memory=False)
    with raysgd.Trainer(2, "none", run_config=run, checkpoint_config=storage_alone) as trainer:
        assert trainer.run(steps, config, callbacks=quiet()) == begun_at
        warnings = [event["message"] for event in events_of(trainer, "warning")]
        assert [f"checkpoint {number} skipped" in message for number, message in zip(damaged, warnings, strict=False)]
        assert len([message for message in warnings if " skipped: " in message]) == len(damaged)
        assert len(events_of(trainer, "failure")) == 1, "a damaged file is not a failure of a worker"


def test_damage_on_storage_costs_nothing_with_a_copy_in_memory(ray_cluster: Any, tmp_path: Path) -> None:
    run = raysgd.RunConfig(name="r", storage_path=str(tmp_path))
    config = {"folder": str(tmp_path), "checkpoints": str(tmp_path / "r/run_001/checkpoints"), "damaged": (4,)}
    with raysgd.Trainer(2, "none", run_config=run) as trainer:
        assert trainer.run(steps, config, callbacks=quiet()) == 4


def test_run_raises_when_all_checkpoints_are_damaged(ray_cluster: Any, tmp_path: Path) -> None:
    run = raysgd.RunConfig(name="r", storage_path=str(tmp_path))
    config = {"folder": str(tmp_path), "checkpoints": str(tmp_path / "r/run_001/checkpoints"), "damaged": (1, 2, 3, 4)}
    trainer = raysgd.Trainer(2, "none", run_config=run, checkpoint_config=raysgd.CheckpointConfig(keep_in_memory=False))
    with trainer, pytest.raises(CheckpointCorruptError, match="checkpoint_000001"):
        trainer.run(steps, config, callbacks=quiet())
