"""Trainings that are saved within an accumulated step, for the processes of a `RankGroup` and for one process alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import raysgd
from raysgd.engine.model.local_tensors import local_of
from raysgd.session import context
from support.group_sessions import group_session

NUM_BATCHES, STEPS, SAVED_AFTER = 11, 4, 6  # the save is after two of the four batches of the second step

STRATEGIES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "ZeRO 3, unused": {"zero_stage": 3, "find_unused_parameters": True},
    "bf16 weights": {"precision": "bf16-true"},
    "bf16 weights, ZeRO 1": {"precision": "bf16-true", "zero_stage": 1},
    "fp16": {"precision": "fp16", "loss_scale": 1024.0},
    "weighted": {"weighted_gradients": True},
    "weighted, ZeRO 2": {"weighted_gradients": True, "zero_stage": 2},
}


class Branches(nn.Module):
    """Has a layer that a few batches use, so that its gradient is there before the save or after it alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.seldom, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(self.seldom(x).tanh() + x if uses_all else x)


def rows_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of a batch; there is another number in each batch, and on the ranks."""
    x = torch.randn(4 + number % 3, 3, generator=torch.Generator().manual_seed(number))
    own = x[context.current().world_rank :: context.current().world_size]
    return own, own.sum(1, keepdim=True)


def train(strategy: str, *, first: int = 0, branches: bool = False) -> list[float]:
    """Train in this process alone, or in a group; return the weights."""
    strategies = STRATEGIES[strategy]
    engine, model = raysgd.Engine(accumulation_steps=STEPS, **strategies), Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
    if first:
        state = engine.load_checkpoint()
        assert state == {"done": first}
    for number in range(first, NUM_BATCHES):
        x, y = rows_of(number)
        loss = (model(x, not branches or number in (4, 9)).float() - y).square().mean()
        engine.backward(loss, len(x) if "weighted" in strategy else None)
        optimizer.step()
        optimizer.zero_grad()
        if number + 1 == SAVED_AFTER and not first:
            engine.save_checkpoint(done=SAVED_AFTER)
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    found: list[float] = torch.cat([local_of(each).detach().float().flatten() for each in whole]).tolist()
    return found


def train_on_ranks(strategy: str, folder: str, *, first: int = 0, branches: bool = False) -> list[float]:
    """Train on the ranks of a group, with checkpoints in a folder."""
    with group_session(Path(folder)):
        return train(strategy, first=first, branches=branches)
