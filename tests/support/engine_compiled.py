"""Trains a tiny model under strategies with ``torch.compile``. Runs in processes of one group."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters

from support.engine_steps import train_language


def train(kind: str, num_steps: int, backend: str, **strategies: Any) -> tuple[list[float], int]:
    """Return the losses, and how many functions torch has compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_default_backend(backend)
    try:
        losses = train_language(kind, num_steps, **strategies)
        return losses, counters["frames"]["ok"]
    finally:
        torch.compiler.set_default_backend(None)
        torch._dynamo.reset()
