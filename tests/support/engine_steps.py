"""Trains a small model with the engine and without it, for tests that compare the two. Runs in processes of one group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.local import LocalSession
from raysgd.torch.model import unwrap

NUM_ROWS, NUM_FEATURES = 48, 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A few blocks between two layers, with a frozen and a scalar parameter."""

    def __init__(self, width: int = 14, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.gain * self.last(x) + self.frozen.sum()).flatten()


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, NUM_FEATURES, generator=generator)
    return x, x[:, 0] * x[:, 1] + 0.1 * torch.randn(NUM_ROWS, generator=generator)


def make_model() -> Model:
    torch.manual_seed(5)
    return Model()


def make_optimizer(model: nn.Module, name: str = "AdamW") -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1 and parameter.requires_grad]
    settings = {"momentum": 0.9} if name == "SGD" else {}
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return getattr(torch.optim, name)(groups, lr=0.01, **settings)


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


@contextmanager
def session_of(rank: int, size: int, workers_per_replica: int = 1, folder: str | None = None) -> Iterator[None]:
    """Be a worker of a run, as far as ranks and checkpoints of one rank go."""
    session = LocalSession(folder)
    session.identity = Identity(rank, size, rank, size, workers_per_replica=workers_per_replica)
    session.in_worker = True
    context.install(session)
    try:
        yield
    finally:
        context.uninstall()


def train_plainly(
    num_steps: int, *, batch: int, clip: float | None = None, scheduler_first: bool = False
) -> list[float]:
    """Return the losses of a loop in one process, and the sum of all parameters at its end."""
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    losses: list[float] = []
    x, y = make_rows()
    while len(losses) < num_steps:
        for at in range(0, NUM_ROWS, batch):
            loss = nn.functional.mse_loss(model(x[at : at + batch]), y[at : at + batch])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scheduler_first:
                scheduler.step()
            optimizer.step()
            if not scheduler_first:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == num_steps:
                break
    return [*losses, sum(float(parameter.double().sum()) for parameter in model.parameters())]


def train(
    num_steps: int, *, batch: int, scheduler_first: bool = False, clip_by_hand: float | None = None, **strategies: Any
) -> list[float]:
    """Return what `train_plainly` does, of a loop with the engine, whose ranks and micro-batches divide each batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = raysgd.EngineConfig(**strategies)
    with session_of(rank, size, config.workers_per_replica):
        engine = raysgd.Engine(config)
        model = make_model()
        each = batch // raysgd.data_parallel_size() // config.accumulation_steps
        model, optimizer, scheduler, loader, _ = engine.compose(
            model=model,
            optimizer=make_optimizer(model),
            lr_scheduler_fn=make_scheduler,
            train_dataloader=DataLoader(TensorDataset(*make_rows()), batch_size=each),
        )
        losses: list[float] = []
        step: list[torch.Tensor] = []
        while len(losses) < num_steps:
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                engine.backward(loss)
                step.append(loss.detach())
                if clip_by_hand is not None:
                    engine.clip_grad_norm_(clip_by_hand)
                if scheduler_first:
                    scheduler.step()
                optimizer.step()
                if not scheduler_first:
                    scheduler.step()
                optimizer.zero_grad()
                if len(step) == config.accumulation_steps:
                    losses.append(mean_over_ranks(step))
                    step.clear()
                if len(losses) == num_steps:
                    break
        return [*losses, total(model)]


def train_uneven(num_steps: int, sizes: list[list[int]], **strategies: Any) -> list[float]:
    """Train on micro-batches of different sizes; return the sum of all parameters after each step.

    Args:
        sizes: Rows of each micro-batch, by rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = make_rows()
    with session_of(rank, size):
        engine = raysgd.Engine(accumulation_steps=len(sizes[0]), weighted_gradients=True, **strategies)
        model = make_model()
        model, optimizer, _, _, _ = engine.compose(model=model, optimizer=make_optimizer(model))
        sums = []
        for _ in range(num_steps):
            at = sum(sum(of_rank) for of_rank in sizes[:rank])
            for count in sizes[rank]:
                loss = nn.functional.mse_loss(model(x[at : at + count]), y[at : at + count])
                engine.backward(loss, weight=count)
                optimizer.step()
                optimizer.zero_grad()
                at += count
            sums.append(total(model))
        return sums


def train_evenly(num_steps: int, num_rows: int) -> list[float]:
    """Return what `train_uneven` does, of the plain loop over all rows at once."""
    model = make_model()
    optimizer = make_optimizer(model)
    x, y = make_rows()
    sums = []
    for _ in range(num_steps):
        nn.functional.mse_loss(model(x[:num_rows]), y[:num_rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sums.append(total(model))
    return sums


def mean_over_ranks(values: list[torch.Tensor]) -> float:
    mean = torch.stack(values).double().mean()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def total(model: nn.Module) -> float:
    """Return the sum of all parameters."""
    found = 0.0
    for parameter in model.parameters():
        value = parameter.detach()
        found += float((value.full_tensor() if hasattr(value, "full_tensor") else value).double().sum())
    return found


def train_language(kind: str, num_steps: int = 20, **strategies: Any) -> list[float]:
    """Return the losses of a tiny model of `engine_models` under some strategies."""
    return _train_language(kind, num_steps, language_optimizer, **strategies)[0]


def train_language_plainly(kind: str, num_steps: int = 20) -> list[float]:
    """Return what `train_language` does, of the plain loop."""
    return _train_language_plainly(kind, num_steps, language_optimizer, None)[0]


def compare_language(kind: str, num_steps: int, **strategies: Any) -> tuple[float, float]:
    """Train by SGD under some strategies and in the plain loop, and return two relative differences.

    AdamW would hide wrong gradients: it divides them by their size.

    Returns:
        The largest difference of a loss; the largest of this rank's parameters, in relation to how far the plain loop moved it.
    """
    from support.engine_models import build, full

    losses, model = _train_language(kind, num_steps, momentum_optimizer, **strategies)
    expected, reference = _train_language_plainly(kind, num_steps, momentum_optimizer, strategies.get("clip_grad_norm"))
    starts, ends = (dict(one.named_parameters(remove_duplicate=False)) for one in (build(kind), reference))
    with torch.no_grad():
        of_parameters = [
            float((full(own) - ends[name]).norm() / (ends[name] - starts[name]).norm())
            for name, own in unwrap(model).named_parameters()
        ]
    return max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True)), max(of_parameters)


def _train_language(
    kind: str, num_steps: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], **strategies: Any
) -> tuple[list[float], nn.Module]:
    from support.engine_models import batch, build

    config = raysgd.EngineConfig(**strategies)
    with session_of(dist.get_rank(), dist.get_world_size(), config.workers_per_replica):
        engine = raysgd.Engine(config)
        model = build(kind, seed=0 if dist.get_rank() == 0 else 7)
        model, optimizer, _, _, _ = engine.compose(model=model, optimizer=make_optimizer(model))
        model.train()
        copies, copy, losses = raysgd.data_parallel_size(), raysgd.data_parallel_rank(), []
        for step in range(num_steps):
            whole = batch(kind, step, is_even=True)
            num_rows = len(whole["input_ids"]) // config.accumulation_steps
            parts = []
            for part in range(config.accumulation_steps):
                own = slice(
                    part * num_rows + num_rows * copy // copies, part * num_rows + num_rows * (copy + 1) // copies
                )
                loss = model(**{key: value[own] for key, value in whole.items()}).loss
                engine.backward(loss)
                parts.append(loss.detach().float())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(mean_over_ranks(parts))
        return losses, model


@functools.cache
def _train_language_plainly(
    kind: str, num_steps: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], clip: float | None
) -> tuple[list[float], nn.Module]:
    from support.engine_models import batch, build

    model, losses = build(kind).train(), []
    optimizer = make_optimizer(model)
    for step in range(num_steps):
        loss = model(**batch(kind, step, is_even=True)).loss
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train_on_loader(
    kind: str, num_rows: int, batch_size: int, num_epochs: int = 2, has_weight: bool = False, **strategies: Any
) -> list[float]:
    """Train on rows of the engine's own loader with weighted gradients; return the loss of all rows after each epoch."""
    from support.engine_models import batch, build

    config = raysgd.EngineConfig(weighted_gradients=True, **strategies)
    with session_of(dist.get_rank(), dist.get_world_size(), config.workers_per_replica):
        engine = raysgd.Engine(config)
        model, whole = build(kind), batch(kind, 0, rows=num_rows, is_even=True)
        rows = [{key: value[row] for key, value in whole.items()} for row in range(num_rows)]
        model, optimizer, _, loader, _ = engine.compose(
            model=model,
            optimizer=language_optimizer(model),
            train_dataloader=DataLoader(rows, batch_size=batch_size),  # type: ignore[arg-type]
        )
        losses = []
        for _ in range(num_epochs):
            model.train()
            for one in loader:
                loss = model(**one).loss
                engine.backward(loss, weight=one["labels"].numel() if has_weight else None)
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses.append(float(model(**whole).loss))
        return losses


def train_on_rows(kind: str, num_rows: int, batch_size: int, num_epochs: int = 2) -> list[float]:
    """Return what `train_on_loader` does, of the plain loop over batches of ``batch_size`` rows and a smaller last one."""
    from support.engine_models import batch, build

    model, whole, losses = build(kind), batch(kind, 0, rows=num_rows, is_even=True), []
    optimizer = language_optimizer(model)
    for _ in range(num_epochs):
        model.train()
        for at in range(0, num_rows, batch_size):
            model(**{key: value[at : at + batch_size] for key, value in whole.items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(float(model(**whole).loss))
    return losses


def language_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW whose eps is above the rounding errors of gradients, which it would otherwise turn into whole steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def momentum_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an SGD whose steps are as long as the gradients, with a state."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def train_unfrozen(num_frozen: int, num_steps: int, **strategies: Any) -> list[float]:
    """Train with a first layer that is frozen for some steps; return each step's loss, and the sum of all parameters.

    Args:
        num_frozen: Steps with the layer frozen. With 0, it is unfrozen between `Engine.compose` and the first step.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with session_of(rank, size):
        engine = raysgd.Engine(**strategies)
        model = make_model()
        model.first.requires_grad_(False)
        model, optimizer, _, _, _ = engine.compose(model=model, optimizer=language_optimizer(model))
        x, y = (part.chunk(size)[rank] for part in make_rows())
        losses = []
        for step in range(num_steps):
            if step == num_frozen:
                model.first.requires_grad_(True)
            loss = nn.functional.mse_loss(model(x), y)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks([loss.detach()]))
        return [*losses, total(model)]


def train_unfrozen_plainly(num_frozen: int, num_steps: int) -> list[float]:
    """Return what `train_unfrozen` does, of the plain loop."""
    model = make_model()
    model.first.requires_grad_(False)
    optimizer = language_optimizer(model)
    x, y = make_rows()
    losses = []
    for step in range(num_steps):
        if step == num_frozen:
            model.first.requires_grad_(True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, total(model)]
