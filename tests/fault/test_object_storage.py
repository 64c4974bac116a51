"""A whole run on object storage: files are put whole, and never appended to.

fsspec's local file system is handled in the same way, and its files can be inspected.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.checkpoint.storage.storage import Storage
from support.runs import events_of, latest_run, quiet, travels_by_value

pytestmark = pytest.mark.fault
travels_by_value(__name__)


def six_steps(config: dict[str, Any]) -> int:
    """Save and report each step; rank 1 dies once, when step 3 is committed."""
    state = raysgd.load_checkpoint()
    start = 0 if state is None else state["step"] + 1
    for step in range(start, config["steps"]):
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step, "weights": np.full(100_000, step)}, all_ranks=True)
        if step == 3 and start == 0:
            while (newest := raysgd.load_checkpoint()) is None or newest["step"] < 3:
                time.sleep(0.01)
            raysgd.barrier()
            if raysgd.world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raysgd.barrier()  # rank 0 must not save again before rank 1 sees the commit
    return start


def files_of(folder: Path) -> dict[str, int]:
    """Return when each file below a folder was last changed, in nanoseconds."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.timeout(300)  # several cold starts: two minutes on a loaded machine
def test_run_on_object_storage_survives_a_worker_death(ray_cluster: Any, tmp_path: Path) -> None:
    uri = f"fsspec+file://{tmp_path}"
    assert not Storage.from_uri(uri).is_local
    keep = raysgd.CheckpointConfig(num_to_keep=2)
    with raysgd.Trainer(
        2, "none", run_config=raysgd.RunConfig(storage_path=uri, name="t"), checkpoint_config=keep
    ) as trainer:
        assert trainer.run(six_steps, {"steps": 6}, callbacks=quiet(), returns="all") == [4, 4]
        assert trainer.run_dir == f"{uri}/t/run_001"
        (failure,) = events_of(trainer, "failure")
        assert failure["ranks"] == [1] and failure["action"] == "retry 1"
        first = latest_run(trainer)
        last = trainer.get_last_checkpoint()
        assert last is not None and last.path is not None and last.path.startswith(f"{uri}/t/run_001/")

        folder = tmp_path / "t/run_001"
        files = files_of(folder)
        assert {"run.json", "events-0000.jsonl", "metrics-0000.jsonl"} < set(files) and "events.jsonl" not in files
        kept = sorted({name.split("/")[1] for name in files if name.startswith("checkpoints/")})
        assert kept == ["checkpoint_000005", "checkpoint_000006"]
        for name in kept:
            parts = {file: at for file, at in files.items() if file.startswith(f"checkpoints/{name}/")}
            assert len(parts) == 5 and max(parts, key=lambda file: parts[file]).endswith("manifest.json")

        assert trainer.run(six_steps, {"steps": 8}, resume_from=last, callbacks=quiet()) == 6
        second = latest_run(trainer)
    assert (first.outcome, second.outcome) == ("done", "done")
    assert list(first.metrics["step"]) == list(range(6))
    assert list(second.metrics["training_iteration"]) == [7, 8]
    assert [checkpoint.iteration for checkpoint in first.checkpoints] == [5, 6]
    part = first.checkpoints[0].load(rank=1)
    assert part["step"] == 4 and np.array_equal(part["weights"], np.full(100_000, 4))
