"""A model of two layers, its batches by number, and its weights: for loops in one process."""

from __future__ import annotations

import torch
from torch import nn


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number)).square().mean()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([each.detach().float().flatten() for each in model.parameters()]).tolist()
