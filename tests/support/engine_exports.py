"""Trains tiny models of transformers under strategies, and saves them for an export. Runs in processes of one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import raysgd
from raysgd.torch.model import unwrap
from support.engine_models import batch, build, full
from support.engine_steps import language_optimizer
from support.group_sessions import group_session


def train_and_save(kind: str, folder: Path, **strategies: Any) -> dict[str, Any]:
    """Train for two steps and save a checkpoint; return this rank's parameters and buffers, whole, as NumPy arrays."""
    config = raysgd.EngineConfig(**strategies)
    with group_session(folder, config.workers_per_replica):
        engine = raysgd.Engine(config)
        model = build(kind)
        model, optimizer, _, _, _ = engine.compose(model=model, optimizer=language_optimizer(model))
        model.train()
        for step in range(2):
            engine.backward(model(**batch(kind, step, is_even=True)).loss)
            optimizer.step()
            optimizer.zero_grad()
        engine.save_checkpoint(step=2)
        return {name: full(value).detach().numpy() for name, value in unwrap(model).state_dict().items()}
