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
