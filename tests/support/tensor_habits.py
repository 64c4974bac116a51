"""A loop of several habits on four ranks, with tensor parallelism and ZeRO. Runs in processes of one group."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import raysgd
from raysgd.torch.model import unwrap
from support.group_sessions import group_session
from support.loop_models import Net

NUM_BATCHES, PER_STEP = 8, 2
KEPT, ADDED = 3, 5  # batches after which gradients are kept, and a layer is added


def train_plainly() -> list[float]:
    """Return what evaluations of averages found, and the sums of the weights."""
    model, optimizer = _make()
    return _train(model, optimizer, lambda loss: (loss / PER_STEP).backward())


def train(zero_stage: int) -> list[float]:
    """Return what `train_plainly` does, of the loop with the engine."""
    with tempfile.TemporaryDirectory() as folder, group_session(Path(folder), workers_per_replica=2):
        model, optimizer = _make()
        engine = raysgd.Engine(
            tensor_parallel=2, zero_stage=zero_stage, accumulation_steps=PER_STEP, find_unused_parameters=True
        )
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer, tensor_plan=plan)

        def backward(loss: torch.Tensor) -> None:
            engine.backward(loss)
            if not optimizer.is_complete:
                optimizer.step()

        return _train(model, optimizer, backward)


def _make() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Net(random.Random(3), {"branch"})
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2)


def _train(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], None]) -> list[float]:
    inner = unwrap(model)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(NUM_BATCHES, 2, 3, generator=generator), torch.randn(NUM_BATCHES, 2, 1, generator=generator)
    found, averages = [], [each.detach().clone() for each in inner.parameters()]
    for number in range(NUM_BATCHES):
        backward(nn.functional.mse_loss(model(x[number], number % 2)[0], y[number]))
        if (number + 1) % PER_STEP:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if number != KEPT:
            optimizer.zero_grad()
        for average, each in zip(averages, inner.parameters(), strict=True):
            average.lerp_(each.detach(), 0.3)
        for is_evaluated in (True, False):
            for place, each in enumerate(inner.parameters()):
                each.data, averages[place] = averages[place], each.data
            if is_evaluated:
                with torch.no_grad():
                    found.append(_sum(model(x[0], 0)[0]))
        if number == ADDED:
            torch.manual_seed(5)
            inner.extra = nn.Linear(inner.width, inner.width)
            optimizer.add_param_group({"params": list(inner.extra.parameters())})
            averages = [each.detach().clone() for each in inner.parameters()]
    return found + [_sum(each) for each in inner.parameters()]


def _sum(tensor: Any) -> float:
    tensor = tensor.detach()
    return float((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).sum())
