"""The parts of the file that benchmarks/bench/why_healthy.py trains."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from bench.why_healthy import WIDTH, compute, make_model


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        compute()
        return self.layers(batch).square().mean()


class Rows(Dataset):
    def __init__(self, size: int) -> None:
        self.x = torch.randn(size, WIDTH)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.x[place]
