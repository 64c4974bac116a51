"""A network whose workers are killed repeatedly gets the same weights, to the bit, as in a fault-free run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raysgd
from support.runs import events_of, make_trainer, once, quiet, travels_by_value

pytestmark = pytest.mark.fault
travels_by_value(__name__)

NUM_ROWS = 900
NUM_EPOCHS = 2
#: Steps in which a worker dies: in both epochs, rank 0 and rank 1.
DEATHS = {7: 1, 16: 0, 25: 1}


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train on files with dropout, and save the full state after each step."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = raysgd.load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    step = start = 0 if state is None else state["step"]
    model = raysgd.torch.prepare_model(model)
    batches = raysgd.get_dataset().get_split().to_torch(batch_size=25, shuffle="window")
    while batches.epoch < NUM_EPOCHS:
        for batch in batches:
            step += 1
            loss = (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            raysgd.report(step=step, loss=loss)
            raysgd.save_checkpoint({"step": step, "model": model, "optimizer": optimizer})
            if config["dies"] and DEATHS.get(step) == raysgd.world_rank() and once(config["folder"], f"death{step}"):
                os.kill(os.getpid(), signal.SIGKILL)
    weights = {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}
    return {"start": start, "steps": step, "weights": weights}


def test_weights_after_deaths_equal_those_of_a_fault_free_run(ray_cluster: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    for number in range(6):
        x = rng.standard_normal((NUM_ROWS // 6, 4)).astype(np.float32)
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4), "y": np.sin(x.sum(axis=1))})
        pq.write_table(table, data / f"{number}.parquet", row_group_size=40)
    failure = raysgd.FailureConfig(abort_grace_s=20, max_failures=len(DEATHS))
    given: dict[str, Any] = {"dataset": data, "callbacks": quiet(), "returns": "all"}
    with make_trainer(tmp_path / "runs", 2, "torch", seed=3, deterministic=True, failure_config=failure) as trainer:
        calm = trainer.run(train, {"dies": False, "folder": str(tmp_path)}, **given)
        after = trainer.run(train, {"dies": True, "folder": str(tmp_path)}, **given)
        assert len(events_of(trainer, "failure")) == len(DEATHS)
    assert calm[0]["start"] == 0 and after[0]["start"] > 7, "it did not resume from a checkpoint"
    assert [of_rank["steps"] for of_rank in (*calm, *after)] == [NUM_EPOCHS * NUM_ROWS // 50] * 4
    assert all(of_rank["weights"] == calm[0]["weights"] for of_rank in (*calm, *after))
