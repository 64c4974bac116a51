"""Trains two models with an engine each, of which one gets gradients of both losses. Runs on all ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.optim import SGD

import raysgd
from raysgd.errors import UsageError
from support.engine_steps import session_of

NUM_BATCHES, ROWS = 8, 8


def make_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
    return generator, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def train_plainly(*, is_cleared: bool, accumulation: int) -> list[float]:
    """Return all weights after a GAN's training in one process.

    Args:
        is_cleared: Whether the discriminator drops the gradients of the generator's loss.
        accumulation: Batches per step.
    """
    generator, discriminator = make_models()
    of_generator, of_discriminator = SGD(generator.parameters(), 0.1), SGD(discriminator.parameters(), 0.1)
    for number in range(NUM_BATCHES):
        noise, real = _batch(number, 0, 1)
        discriminator.requires_grad_(not is_cleared)
        (softplus(-discriminator(generator(noise))).mean() / accumulation).backward()
        discriminator.requires_grad_()
        of_step = (number + 1) % accumulation == 0
        if of_step:
            of_generator.step()
            of_generator.zero_grad()
        fake = generator(noise).detach()
        loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()
        (loss / accumulation).backward()
        if of_step:
            of_discriminator.step()
            of_discriminator.zero_grad()
    return _weights(generator, discriminator)


def train(*, is_cleared: bool, **strategies: Any) -> list[float] | str:
    """Return what `train_plainly` does, of engines with some strategies; or the error that refuses the loop."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with session_of(rank, size):
        models: list[Any] = []
        optimizers: list[Any] = []
        engines = [raysgd.Engine(**strategies) for _ in range(2)]
        for engine, model in zip(engines, make_models(), strict=True):
            composed, optimizer, *_ = engine.compose(model=model, optimizer=SGD(model.parameters(), 0.1))
            models.append(composed)
            optimizers.append(optimizer)
        (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
        for number in range(NUM_BATCHES):
            noise, real = _batch(number, rank, size)
            engines[0].backward(softplus(-discriminator(generator(noise))).mean())
            of_generator.step()
            of_generator.zero_grad()
            if is_cleared:
                of_discriminator.zero_grad()
            fake = generator(noise).detach()
            try:
                engines[1].backward(softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean())
            except UsageError as error:
                assert number == 0, "it has trained before"
                return str(error)
            of_discriminator.step()
            of_discriminator.zero_grad()
        return _weights(generator, discriminator)


def _batch(number: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's rows of a batch: noise, and real samples."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(ROWS, 9, generator=generator).chunk(size)[rank]
    return rows[:, :3], rows[:, 3:]


def _weights(*models: nn.Module) -> list[float]:
    parameters = [each.detach() for model in models for each in model.parameters()]
    whole: list[Any] = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in parameters]
    return torch.cat([each.float().flatten() for each in whole]).tolist()
