"""A worker is killed inside an epoch: each row is trained on exactly once, counted from the checkpoint that is resumed.

The rows trained on are part of the saved state, as weights would be: rows that were read after the checkpoint are lost
with it, and must come again.
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
from support.runs import PATIENCE_S, events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

NUM_ROWS = 101
NUM_EPOCHS = 3


TRAINER = {"failure_config": raysgd.FailureConfig(max_failures=2), "seed": 5}


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Train three epochs and save in every third step; rank 1 dies in two steps, some steps after a save."""
    state = raysgd.load_checkpoint() or {"seen": [], "step": 0}
    starts_at = state["step"]
    batches = raysgd.get_dataset().get_split().to_torch(batch_size=3, shuffle="full")
    first_epoch = batches.epoch
    for epoch in range(first_epoch, NUM_EPOCHS):
        for batch in batches:
            state["seen"] += [(epoch, row) for row in batch["x"].tolist()]
            state["step"] += 1
            if state["step"] % 3 == 0:
                raysgd.save_checkpoint(state, all_ranks=True)
            raysgd.report(step=state["step"])
            if config["dies"] and state["step"] in (8, 29) and once(config["folder"], f"{state['step']}-{rank()}"):
                raysgd.barrier()  # both ranks have made the saves before
                if rank() == 1:
                    die_after_checkpoint_of(state["step"] // 3 * 3)
    return {"seen": state["seen"], "starts_at": starts_at, "first_epoch": first_epoch}


def die_after_checkpoint_of(step: int) -> None:
    """Kill this process once the checkpoint is committed. Loading it moves the data position, which is harmless here."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state = raysgd.load_checkpoint()
        if state is not None and state["step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    raise TimeoutError


def rank() -> int:
    return raysgd.world_rank()


def test_each_row_is_trained_on_once_per_epoch_through_deaths(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    data = {"x": np.arange(NUM_ROWS)}
    runs = {}
    for dies in (False, True):
        config = {"folder": str(tmp_path), "dies": dies}
        runs[dies] = trainer.run(trained, config, dataset=data, callbacks=quiet(), returns="all")
        assert len(events_of(trainer, "failure")) == 2 * dies
    seen = sorted(tuple(row) for of_rank in runs[True] for row in of_rank["seen"])
    assert seen == [(epoch, row) for epoch in range(NUM_EPOCHS) for row in range(NUM_ROWS)]
    assert [of_rank["seen"] for of_rank in runs[True]] == [of_rank["seen"] for of_rank in runs[False]], (
        "rows came in another order, or to another rank, than without the deaths"
    )
    assert [of_rank["starts_at"] for of_rank in runs[True]] == [27, 27]
    assert [of_rank["first_epoch"] for of_rank in runs[True]] == [1, 1]


def logged(config: dict[str, Any]) -> None:
    """Train until the group has shrunk and grown back; write a line per row to a file per attempt and rank."""
    state = raysgd.load_checkpoint()
    step = first = 0 if state is None else state["step"]
    shard = raysgd.get_dataset().get_split()
    with open(Path(config["folder"], f"{first}-{raysgd.world_size()}-{rank()}"), "a") as log:
        while True:
            for batch in shard.iter_batches(batch_size=4, shuffle="full"):
                step += 1
                log.writelines(f"{step} {shard.epoch} {row}\n" for row in batch["x"].tolist())
                log.flush()
                raysgd.report(step=step)
                raysgd.save_checkpoint({"step": step})
                if step >= 5 and rank() == 2 and once(config["folder"], "death"):
                    die_after_checkpoint_of(1)  # the next attempt does not begin at 0 again
                time.sleep(0.05)
            if first and raysgd.world_size() == 3:
                return


def test_each_row_is_trained_on_once_through_shrinking_and_growing(ray_cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    failure = raysgd.FailureConfig(max_failures=1)
    with make_trainer(tmp_path / "runs", (1, 3), failure_config=failure, seed=5) as trainer:
        data = {"x": np.arange(NUM_ROWS)}
        trainer.run(logged, {"folder": str(folder)}, dataset=data, callbacks=quiet())
        sizes = [(data["old"], data["new"]) for data in events_of(trainer, "resize")]
        begun = [data["world_size"] for data in events_of(trainer, "attempt_start")]
    assert sizes == [(3, 2), (2, 3)] and begun == [3, 2, 3]

    lines = {tuple(map(int, path.name.split("-"))): path.read_text() for path in folder.glob("*-*-*")}
    starts = sorted({first for first, _, _ in lines})
    seen = []
    for (first, _, _), text in lines.items():
        until = min((start for start in starts if start > first), default=None)
        for step, epoch, row in (map(int, line.split()) for line in text.splitlines()):
            if until is None or step <= until:  # rows after the resumed checkpoint were read again
                seen.append((epoch, row))
    num_epochs = 1 + max(epoch for epoch, _ in seen)
    assert sorted(seen) == [(epoch, row) for epoch in range(num_epochs) for row in range(NUM_ROWS)]
