"""`raysgd why` on real runs with a cause put into them: the first verdict names it, and the ledger adds up."""

from __future__ import annotations

import gc
import io
import json
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.cli.main import main
from support.runs import make_trainer, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.timeout(240)]
travels_by_value(__name__)

#: What a step computes; sleep, so that other programs on the machine do not slow one rank down.
STEP_S = 0.03
NUM_STEPS = 60
SLOW_RANK = 1
#: How much longer the cause makes a step, in parts of `STEP_S`.
STRENGTHS = (0.4, 0.8, 2.0)

TRAINER: dict[str, Any] = {"num_workers": 2, "backend": "torch"}


def why(trainer: raysgd.Trainer) -> dict[str, Any]:
    """Return what ``raysgd why --json`` prints of the newest run."""
    assert trainer.run_dir is not None
    with redirect_stdout(io.StringIO()) as out:
        assert main(["why", "--json", str(trainer.run_dir)]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


class Numbers:
    """A map-style dataset, whose items take their time on some ranks."""

    def __init__(self, item_s: float, only_rank: int | None = None) -> None:
        self.item_s, self.only_rank = item_s, only_rank

    def __len__(self) -> int:
        return 2 * NUM_STEPS

    def __getitem__(self, index: int) -> Any:
        import torch

        if self.only_rank in (None, raysgd.world_rank()):
            time.sleep(self.item_s)
        return torch.full((4,), float(index))


class Slow(raysgd.Callback):
    """A callback in the workers that takes its time, as a logger that waits for a server."""

    runs_in = "worker"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_result(self, result: raysgd.Result) -> None:
        time.sleep(self._seconds)


def train(config: dict[str, Any]) -> None:
    """Train a small model with DDP; ``config`` says what makes the steps longer."""
    import torch
    from torch.utils.data import DataLoader

    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    dataset: Any = Numbers(config.get("item_s", 0.0), config.get("item_rank"))
    loader = raysgd.torch.prepare_data_loader(DataLoader(dataset, batch_size=1))
    kept = [[number] for number in range(config.get("objects", 0))]
    state = {"weights": np.zeros(config.get("megabytes", 0) * 2**17)}
    for step, batch in enumerate(loader):
        time.sleep(STEP_S)
        if raysgd.world_rank() == SLOW_RANK:
            time.sleep(config.get("extra_s", 0.0))
        model(batch).sum().backward()
        if kept:
            gc.collect()
        if config.get("megabytes"):
            raysgd.save_checkpoint(state)
        raysgd.report({"step": step})


CAUSES: dict[str, dict[str, float]] = {
    "healthy": {},
    "slow storage": {"item_s": STEP_S},
    "slow items on one rank": {"item_s": STEP_S, "item_rank": SLOW_RANK},
    "slow rank": {"extra_s": STEP_S},
}
NAMES = {"slow storage": "data", "slow items on one rank": "data", "slow rank": "straggler"}


def test_a_healthy_run_has_no_cause_and_its_ledger_adds_up(trainer: raysgd.Trainer) -> None:
    began = time.time()
    trainer.run(train, {})
    took_s = time.time() - began
    found = why(trainer)
    assert [each for each in found["causes"] if each["cause"] != "start"] == []
    total_s = sum(found["seconds"].values())
    assert 0.5 * took_s < total_s / 2 <= took_s
    for uses in found["ranks"].values():
        assert sum(uses.values()) == pytest.approx(total_s / 2, rel=0.01)
    assert trainer.run_info is not None
    assert trainer.run_info.goodput == pytest.approx(found["goodput"], abs=0.01)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("cause", NAMES)
def test_first_finding_is_the_cause(trainer: raysgd.Trainer, cause: str, strength: float) -> None:
    config = {key: value if key == "item_rank" else value * strength for key, value in CAUSES[cause].items()}
    trainer.run(train, config)
    found = [each for each in why(trainer)["causes"] if each["cause"] != "start"]
    assert found[0]["cause"] == NAMES[cause]
    assert ("steps wait" if cause == "slow storage" else f"rank {SLOW_RANK} on ") in found[0]["text"]


def test_checkpoints_that_are_too_many(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {"megabytes": 64})
    assert "checkpoints" in [each["cause"] for each in why(trainer)["causes"]]


def test_garbage_collections(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {"objects": 600_000})
    found = [each for each in why(trainer)["causes"] if each["cause"] != "start"]
    assert found[0]["cause"] == "garbage collection"


def test_a_callback_that_waits(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {}, callbacks=[Slow(STEP_S)])
    found = [each for each in why(trainer)["causes"] if each["cause"] != "start"]
    assert found[0]["cause"] == "callbacks"


def compile_again(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda values: (values @ values.T).sum())
    for number in range(1, NUM_STEPS):
        step(jnp.ones((number if config["again"] else 3, 4))).block_until_ready()
        time.sleep(STEP_S)
        raysgd.report({"step": number})


@pytest.mark.parametrize("again", [True, False])
def test_compilations(tmp_path: Path, ray_cluster: Any, again: bool) -> None:
    with make_trainer(tmp_path, num_workers=1, backend="jax") as trainer:
        trainer.run(compile_again, {"again": again})
        found = [each["cause"] for each in why(trainer)["causes"] if each["cause"] != "start"]
    assert found == (["compiling"] if again else [])
