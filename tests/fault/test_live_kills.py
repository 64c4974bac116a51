"""Ranks are killed again and again, at random moments: each kill costs one step, and the final weights have the same bits.

``RAYSGD_KILLS`` is the number of kills of each kind of training, and ``RAYSGD_KILLS_SEED`` repeats a plan.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

import raysgd
from support.live_kills import KINDS, NUM_RANKS, make_plan, run

NUM_KILLS = int(os.environ.get("RAYSGD_KILLS", 20))
SEED = int(os.environ.get("RAYSGD_KILLS_SEED", random.randrange(10**6)))
KILLS_PER_RUN = 20
#: A new process takes seconds on a busy machine, and more are killed than there are spares.
PER_KILL_S = 15.0

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault, pytest.mark.timeout(NUM_KILLS * PER_KILL_S + 240)]

TRAINER = {
    "num_workers": NUM_RANKS,
    "backend": "torch",
    "failure_config": raysgd.FailureConfig(max_failures=-1, num_spares=2),
    "seed": 3,
    "deterministic": True,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kill_costs_one_step(trainer: raysgd.Trainer, tmp_path: Path, kind: str) -> None:
    print(f"RAYSGD_KILLS_SEED={SEED}")
    took: list[float] = []
    for number in range(0, NUM_KILLS, KILLS_PER_RUN):
        plan = make_plan(SEED + number, min(KILLS_PER_RUN, NUM_KILLS - number), KINDS[kind].num_pieces)
        num_steps = plan[-1].step + 5
        calm = run(trainer, tmp_path / f"calm-{number}", kind, [], num_steps)
        killed = run(trainer, tmp_path / f"killed-{number}", kind, plan, num_steps)
        assert calm.tensors.keys() == killed.tensors.keys()
        differing = [name for name, tensor in calm.tensors.items() if not np.array_equal(tensor, killed.tensors[name])]
        assert not differing, f"RAYSGD_KILLS_SEED={SEED + number}: {differing}"
        took += killed.to_next_step_s
        print(f"{len(took)} kills; to the next step: {np.quantile(took, [0.5, 0.99]).round(2)} s (median, 99 %)")
