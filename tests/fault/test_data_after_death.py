"""A worker that is killed in the middle of an epoch: each row is trained on exactly once, by the checkpoint gone on from.

What was trained on is part of the state, as weights would be: rows that were read after the checkpoint are forgotten
with it, and must come again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    with make_trainer(tmp_path_factory.mktemp("runs"), failure=raysgd.FailureConfig(max_failures=2), seed=5) as trainer:
        yield trainer


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Three epochs. Saved in every third step; rank 1 dies in two steps of its choosing, some steps after a save."""
    state = raysgd.load_checkpoint() or {"seen": [], "steps": 0}
    starts_at = state["steps"]
    batches = raysgd.get_dataset().get_split().to_torch(batch_size=3, shuffle="full")
    first_epoch = batches.epoch
    for epoch in range(first_epoch, NUM_EPOCHS):
        for batch in batches:
            state["seen"] += [(epoch, row) for row in batch["x"].tolist()]
            state["steps"] += 1
            if state["steps"] % 3 == 0:
                raysgd.save_checkpoint(state, all_ranks=True)
            raysgd.report(step=state["steps"])
            if config["dies"] and state["steps"] in (8, 29) and once(config["folder"], f"{state['steps']}-{rank()}"):
                raysgd.barrier()  # both ranks have come here, so the saves before have been made by both
                if rank() == 1:
                    die_after_checkpoint_of(state["steps"] // 3 * 3)
    return {"seen": state["seen"], "starts_at": starts_at, "first_epoch": first_epoch}


def die_after_checkpoint_of(step: int) -> None:
    """Once it is committed; looking for it moves this rank's place in the data, which is of no more use."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state = raysgd.load_checkpoint()
        if state is not None and state["steps"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    raise TimeoutError


def rank() -> int:
    return raysgd.world_rank()


def test_each_row_of_each_epoch_is_trained_on_once(trainer: raysgd.Trainer, tmp_path: Path) -> None:
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
    """Epochs until the group has shrunk and grown back; a line for each row, in a file for each attempt and rank."""
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
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.05)
            if first and raysgd.world_size() == 3:
                return


def test_it_is_so_whatever_the_size_of_the_group(ray_cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    failure = raysgd.FailureConfig(max_failures=1)
    with make_trainer(tmp_path / "runs", (1, 3), failure=failure, seed=5) as trainer:
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
            if until is None or step <= until:  # what came after the checkpoint gone on from came again
                seen.append((epoch, row))
    num_epochs = 1 + max(epoch for epoch, _ in seen)
    assert sorted(seen) == [(epoch, row) for epoch in range(num_epochs) for row in range(NUM_ROWS)]
