"""What ranks of `support.torch_ranks` do with ``Engine(plan="auto")``, and the plain loops that they are compared with."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd.errors import ConfigError
from support.engine_models import batch, build
from support.engine_steps import Model, language_optimizer, make_rows, mean_over_ranks, session_of

WIDTH, DEPTH, NUM_ROWS, NUM_STEPS = 128, 6, 24, 4
NUM_BLOCKS = 4


class OwnOptimizer(torch.optim.AdamW):
    """An optimizer of which nobody knows what its step does."""


def _make_model() -> nn.Module:
    torch.manual_seed(5)
    return Model(WIDTH, DEPTH)


def _make_optimizer(model: nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    # As in `language_optimizer`: eps is above the rounding errors of gradients. `foreach` would make other temporary tensors.
    return kind([each for each in model.parameters() if each.requires_grad], lr=1e-3, eps=1e-6, foreach=False)  # type: ignore[no-any-return]


def train_plainly() -> list[float]:
    """Return the losses of the loop of `train_planned`, in one process."""
    model, losses = _make_model(), []
    optimizer = _make_optimizer(model)
    x, y = make_rows()
    for at in [0, NUM_ROWS] * (NUM_STEPS // 2):
        loss = nn.functional.mse_loss(model(x[at : at + NUM_ROWS]), y[at : at + NUM_ROWS])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_planned(memory_of_ranks: list[float | None], *, is_own: bool = False, **fixed: Any) -> dict[str, Any]:
    """Train with a plan for some memory, and return what it chose, the losses, and the bytes that were measured.

    Args:
        memory_of_ranks: The ``memory_per_device`` that each rank gives; None: its part of the node's memory.
        is_own: Whether the optimizer is of a class that the engine does not know.
        fixed: Strategies that are chosen by hand.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with session_of(rank, size):
        engine = raysgd.Engine(plan="auto", memory_per_device=memory_of_ranks[rank], **fixed)
        model = _make_model()
        inner = _make_optimizer(model, OwnOptimizer if is_own else torch.optim.AdamW)
        loader: Any = DataLoader(TensorDataset(*make_rows()), batch_size=NUM_ROWS // size)
        try:
            model, optimizer, _, loader, _ = engine.compose(model=model, optimizer=inner, train_dataloader=loader)
        except ConfigError as error:
            return {"error": str(error)}
        tracker: Any = None
        if engine.config.zero_stage == 3:  # torch has a tracker for it
            tracker = FSDPMemTracker(model, inner)
            tracker.track_external(model, inner)
        losses: list[float] = []
        states: list[int] = []
        with contextlib.nullcontext() if tracker is None else tracker:
            for _ in range(NUM_STEPS // 2):
                for x, y in loader:
                    loss = nn.functional.mse_loss(model(x), y)
                    engine.backward(loss)
                    optimizer.step()
                    states.append(engine.memory().total)
                    optimizer.zero_grad()
                    losses.append(mean_over_ranks([loss.detach()]))
                    if tracker is not None:
                        tracker.reset_mod_stats()  # it follows one call of a module; the peak stays
        assert engine.plan is not None
        return {
            "config": engine.config,
            "losses": losses,
            "states": max(states),
            "peak": None if tracker is None else _peak_of(tracker),
            "predicted": engine.plan.chosen.memory.total,
            "memory": engine.plan.memory_per_device,
            "described": engine.describe(),
        }


def _peak_of(tracker: Any) -> int:
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return next(size for kind, size in peak.items() if getattr(kind, "name", kind) == "Total")


def train_replicas(memory: float, **fixed: Any) -> tuple[Any, list[float], str]:
    """Train a language model whose copies are on two ranks each; return the strategies, the losses and the table."""
    with session_of(dist.get_rank(), dist.get_world_size(), workers_per_replica=2):
        engine = raysgd.Engine(plan="auto", memory_per_device=memory, **fixed)
        model = build("gpt2", seed=dist.get_rank())
        copies, copy = raysgd.data_parallel_size(), raysgd.data_parallel_rank()
        parts = [
            {key: value.chunk(copies)[copy] for key, value in batch("gpt2", step, is_even=True).items()}
            for step in range(NUM_STEPS)
        ]
        model, optimizer, _, _, _ = engine.compose(
            model=model, optimizer=language_optimizer(model), sample_batch=parts[0]
        )
        model.train()
        losses = []
        for part in parts:
            loss = model(**part).loss
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks([loss.detach()]))
        return engine.config, losses, engine.describe()


def measure_activations(kind: str, **strategies: Any) -> int | None:
    """Return the activations of a step of a small model of four blocks, as the engine measures them on this rank."""
    config = raysgd.EngineConfig(**strategies)
    with session_of(dist.get_rank(), dist.get_world_size(), config.workers_per_replica):
        engine = raysgd.Engine(config)
        model = build(kind, num_blocks=NUM_BLOCKS)
        model, optimizer, _, _, _ = engine.compose(model=model, optimizer=language_optimizer(model))
        model.train()
        copies, copy = raysgd.data_parallel_size(), raysgd.data_parallel_rank()
        part = {key: value.chunk(copies)[copy] for key, value in batch(kind, 0, is_even=True).items()}
        for _ in range(2):
            with engine.measure_activations():
                engine.backward(model(**part).loss)
            optimizer.step()
            optimizer.zero_grad()
        return engine.memory().kept_activations


def describe(kind: str, **strategies: Any) -> str:
    """Return the table of what an engine did to a small model."""
    config = raysgd.EngineConfig(**strategies)
    with session_of(dist.get_rank(), dist.get_world_size(), config.workers_per_replica):
        engine = raysgd.Engine(config)
        model = build(kind)
        engine.compose(model=model, optimizer=language_optimizer(model))
        return engine.describe()
