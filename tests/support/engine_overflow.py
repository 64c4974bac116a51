"""Trains a tiny model in fp16 while gradients overflow on one rank, and the plain loop that skips the same steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

import raysgd
from raysgd.engine.model.local_tensors import local_of
from support.engine_models import batch, build
from support.engine_steps import language_optimizer, mean_over_ranks, session_of
from support.loop_models import TOO_LARGE, Multiply

KIND = "gpt2"


def _overflow_in(step: Any, is_on: Callable[[], bool]) -> None:
    """Make a gradient overflow while it is divided over the ranks."""
    finish = step._finish

    def overflowing() -> None:
        if is_on():
            elsewhere = (
                step._gradients._counted_elsewhere
            )  # the same gradient is on another stage, whose norm counts it
            updated = [each for each in reversed(step._gradients.updated()) if id(each) not in elsewhere]
            local = (local_of(each.grad) for each in updated if each.grad is not None)
            next(each for each in local if each.numel()).view(-1)[:1] = torch.inf
        finish()

    step._finish = overflowing


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(
    num_steps: int, overflows: Collection[int], *, where: str, scheduler_first: bool = False, **strategies: Any
) -> tuple[list[float], list[float], float]:
    """Return the losses, the learning rates after each step, and the loss scale at the end.

    Args:
        overflows: Steps in which gradients overflow on the last rank.
        where: ``"backward"``: in the backward pass of its rows; ``"gradient"``: in what its part of the optimizer updates.
    """
    rank, size, step = dist.get_rank(), dist.get_world_size(), 0
    config = raysgd.EngineConfig(precision="fp16", loss_scale=1024.0, **strategies)
    with session_of(rank, size, config.workers_per_replica):
        engine = raysgd.Engine(config)
        model = build(KIND)

        def overflow(module: Any, args: Any, output: Any) -> Any:
            if step not in overflows or rank != size - 1 or where != "backward":
                return output
            is_tuple = isinstance(output, tuple)
            first = Multiply.apply(output[0] if is_tuple else output, TOO_LARGE)
            return (first, *output[1:]) if is_tuple else first

        model.transformer.h[-1].register_forward_hook(overflow)
        model, optimizer, scheduler, _, _ = engine.compose(
            model=model, optimizer=language_optimizer(model), lr_scheduler_fn=schedule
        )
        _overflow_in(engine._step, lambda: where == "gradient" and step in overflows and rank == size - 1)
        model.train()
        losses, rates = [], []
        copies, copy = raysgd.data_parallel_size(), raysgd.data_parallel_rank()
        for step in range(num_steps):
            whole = batch(KIND, step, is_even=True)
            num_rows = len(whole["input_ids"])
            own = slice(num_rows * copy // copies, num_rows * (copy + 1) // copies)
            loss = model(**{key: value[own] for key, value in whole.items()}).loss
            engine.backward(loss)
            if scheduler_first:
                scheduler.step()
            optimizer.step()
            if not scheduler_first:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks([loss.detach().float()]))
            rates.append(scheduler.get_last_lr()[0])
        return losses, rates, engine.loss_scale


def train_plainly(num_steps: int, skipped: Collection[int]) -> tuple[list[float], list[float]]:
    """Return what `train` does but for the scale, of a plain loop in fp32 that leaves out the steps ``skipped``."""
    model = build(KIND).train()
    optimizer = language_optimizer(model)
    scheduler = schedule(optimizer)
    losses, rates = [], []
    for step in range(num_steps):
        loss = model(**batch(KIND, step, is_even=True)).loss
        loss.backward()
        if step not in skipped:
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
    return losses, rates
