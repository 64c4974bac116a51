"""Loops of users with a live state, in which ranks are killed: the final state has the bits of the undisturbed run."""

from __future__ import annotations

import random
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from support.live_habits import LOOPS
from support.live_kills import Kill, Killer
from support.runs import events_of, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault, pytest.mark.timeout(240)]
travels_by_value(__name__)

NUM_RANKS = 3
BATCH = 6
NUM_STEPS = 16
#: The steps in which a rank is killed.
KILLED_IN = (5, 9, 12)
#: Calls of functions in a step.
CALLS_OF_STEP = 800

TRAINER = {
    "num_workers": NUM_RANKS,
    "backend": "torch",
    "failure_config": raysgd.FailureConfig(max_failures=-1, num_spares=1),
    "seed": 3,
    "deterministic": True,
}


def train(config: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    loop = LOOPS[config["loop"]]()
    live = raysgd.live_state(**loop.objects)
    killer = Killer(Path(config["folder"]), [Kill(*each) for each in config["plan"]], raysgd.world_rank())
    number = 0
    if (state := raysgd.load_checkpoint()) is not None:
        loop.resume(live, state)
        number = state["number"]
    batches = raysgd.get_dataset().get_split().to_torch(batch_size=BATCH, shuffle="full")
    for batch in batches:
        number += 1
        killer.begin(number)
        loop.train(number, batch["x"].float(), batch["y"].float()[:, None])
        raysgd.report(number=number)
        if loop.is_complete(number):
            live.step(number=number)
        loop.after()
    return {"number": number, "state": live.state_dict()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one.equal(other)) if hasattr(one, "equal") else bool(one == other)


#: `make nightly` runs the others.
OFTEN = {
    "accumulates, a step in each batch",
    "scaler",
    "two models",
    "replaces states",
    "passes per row",
    "unfreezes",
    "evaluates",
}


@pytest.mark.parametrize(
    "loop", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly) for name in LOOPS]
)
def test_killed_run_ends_with_the_bits_of_the_undisturbed_run(
    trainer: raysgd.Trainer, tmp_path: Path, loop: str
) -> None:
    chosen = random.Random(loop)
    plan = [
        Kill(group, step, chosen.randrange(NUM_RANKS), "code", chosen.randrange(CALLS_OF_STEP))
        for group, step in enumerate(KILLED_IN)
    ]
    rows = NUM_STEPS * NUM_RANKS * BATCH
    generator = np.random.default_rng(0)
    data = {"x": generator.normal(size=(rows, 4)), "y": generator.normal(size=rows)}
    values = []
    for kills in ([], plan):
        folder = tmp_path / f"{len(kills)}"
        folder.mkdir()
        config = {"loop": loop, "folder": str(folder), "plan": [astuple(kill) for kill in kills]}
        values.append(trainer.run(train, config, dataset=data, callbacks=quiet()))
    assert all((folder / kill.name).exists() for kill in plan)
    assert same(*values)
    starts = events_of(trainer, "attempt_start")[1:]
    warnings = [each["message"] for each in events_of(trainer, "warning")]
    if not LOOPS[loop].can_fall_back:
        assert [start["live"] is not None for start in starts] == [True] * len(KILLED_IN), warnings
