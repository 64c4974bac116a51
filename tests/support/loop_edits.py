"""Loops that do something unusual, with the engine on two ranks and without it in one process. Runs in processes of one group.

An edit is what the loop does; a strategy is how the engine is made. `EDITS` and `STRATEGIES` are the rows and the columns of the
table in the guide on large models, and `is_refused` says which of them do not go together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd.errors import RaySGDError
from raysgd.torch.model import unwrap
from support.engine_steps import session_of

RANKS = 2
LIMIT = 0.05  # of gradients, below what they are

#: The columns: names in the guide, the engine's strategies, and whether `raysgd.accelerate` applies them.
STRATEGIES: dict[str, tuple[dict[str, Any], bool]] = {
    "DDP": ({}, False),
    "ZeRO 1": ({"zero_stage": 1}, False),
    "ZeRO 2": ({"zero_stage": 2}, False),
    "ZeRO 3": ({"zero_stage": 3}, False),
    "fp16": ({"precision": "fp16", "loss_scale": 64.0}, False),
    "bf16-true": ({"precision": "bf16-true"}, False),
    "accelerate": ({}, True),
    "accelerate, ZeRO 2": ({"zero_stage": 2}, True),
    "accelerate, ZeRO 3": ({"zero_stage": 3}, True),
}

#: The rows: names of edits, and what the guide calls them.
EDITS: dict[str, str] = {
    "clip norm": "`torch.nn.utils.clip_grad_norm_`",
    "clip value": "`torch.nn.utils.clip_grad_value_`",
    "read": "read gradients, as for a log",
    "scale": "`parameter.grad.mul_(factor)`",
    "noise": "add to `parameter.grad`, made of it: `torch.randn_like(parameter.grad)`",
    "drop": "`parameter.grad = None`",
    "hook": "`parameter.register_hook`, linear",
    "freeze": "freeze layers in the middle of a training",
    "unused": "a layer that is never used, with `find_unused_parameters=True`",
    "branch per step": "layers used in some steps, with `find_unused_parameters=True`",
    "branch per rank": "layers used on some ranks, with `find_unused_parameters=True`",
    "two losses": "two backward passes of one graph, `retain_graph=True`",
    "two passes": "two forward and backward passes for one batch",
    "skip": "skip a batch",
    "zero_grad first": "`zero_grad` before the forward pass",
    "zero_grad of the model": "`model.zero_grad()`",
    "closure": "`optimizer.step(closure)`",
}
_UNUSED = ("unused", "branch per step", "branch per rank")


@dataclass(frozen=True)
class Loop:
    """One loop to compare.

    Attributes:
        strategy: A name of `STRATEGIES`.
        edit: A name of `EDITS`.
        accumulation: Batches per step.
        seed: Of sizes, weights, data and the optimizer.
        finds_unused: Whether ``find_unused_parameters=True`` is given where layers are left out.
    """

    strategy: str
    edit: str
    accumulation: int
    seed: int
    finds_unused: bool = True

    @property
    def is_accelerated(self) -> bool:
        return STRATEGIES[self.strategy][1]

    @property
    def strategies(self) -> dict[str, Any]:
        found = dict(STRATEGIES[self.strategy][0])
        if self.edit in _UNUSED and self.finds_unused:
            found["find_unused_parameters"] = True
        return found if self.accumulation == 1 else {**found, "accumulation_steps": self.accumulation}

    @property
    def tolerance(self) -> float:
        """The largest difference of a weight, of 1 or so."""
        precision = self.strategies.get("precision", "fp32")
        return {"fp32": 2e-5, "fp16": 5e-3, "bf16-true": 3e-2}[precision]


def is_refused(strategy: str, edit: str) -> bool:
    """Return whether an edit of the loop is refused with a strategy, in place of being carried out."""
    if edit == "closure":
        return True
    return edit == "hook" and ("ZeRO 3" in strategy or strategy == "fp16")


def draw(seed: int) -> Loop:
    """Draw a loop."""
    numbers = random.Random(seed)
    strategy, edit = numbers.choice(list(STRATEGIES)), numbers.choice(list(EDITS))
    accumulation = 1 if STRATEGIES[strategy][1] else numbers.choice([1, 2, 3])
    return Loop(strategy, edit, accumulation, seed)


class Net(nn.Module):
    """Layers around blocks, of which a batch may use some, and a scalar."""

    def __init__(self, numbers: random.Random, edit: str) -> None:
        super().__init__()
        width = numbers.randrange(3, 7)
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.has_unused = edit == "unused"
        self.has_branches = edit.startswith("branch")

    def forward(self, x: torch.Tensor, branch: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        hidden = x
        for number, block in enumerate(self.blocks):
            is_left_out = (self.has_unused and number == 1) or (self.has_branches and number != branch)
            if not is_left_out:
                hidden = hidden + torch.tanh(block(hidden))
        return self.gain * self.last(hidden), hidden


class _Parts:
    """The model, the optimizer and the data of a loop, equal in all processes."""

    def __init__(self, loop: Loop) -> None:
        numbers = random.Random(loop.seed)
        torch.manual_seed(loop.seed)
        self.model = Net(numbers, loop.edit)
        self.rows = numbers.randrange(1, 3)  # of a batch
        self.num_batches = numbers.randrange(4, 8)  # on each rank
        count = self.rows * self.num_batches * RANKS
        generator = torch.Generator().manual_seed(loop.seed)
        self.x = torch.randn(count, 3, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)
        kind = numbers.choice(["SGD", "AdamW"])
        decay, rate = numbers.choice([0.0, 0.1]), 0.05
        if kind == "SGD":
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
        else:  # its eps keeps rounding errors of small gradients small
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, eps=1e-2, weight_decay=decay)

    def dataset(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)

    def batch(self, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `raysgd.torch.prepare_data_loader` gives a rank: it takes each second row."""
        own = slice(rank, None, RANKS)
        at = slice(number * self.rows, (number + 1) * self.rows)
        return self.x[own][at], self.y[own][at]


def _branch(loop: Loop, number: int, rank: int) -> int:
    if loop.edit == "branch per rank":
        return (rank + number // 2) % 2
    return number // loop.accumulation % 2


def _losses(loop: Loop, model: Any, batch: tuple[torch.Tensor, torch.Tensor], branch: int) -> Iterator[torch.Tensor]:
    """Yield the losses of a batch; with several, the loop makes a backward pass for each."""
    x, y = batch
    found, hidden = model(x, branch)
    yield (found - y).square().mean()
    if loop.edit == "two losses":
        yield hidden.square().mean()
    elif loop.edit == "two passes":
        yield (model(x * 2, branch)[0] - y).square().mean()


def _is_skipped(loop: Loop, number: int) -> bool:
    """Leave out the first batch of the second step."""
    return loop.edit == "skip" and number == loop.accumulation


def _change_gradients(loop: Loop, model: nn.Module) -> None:
    """Do what the loop does between the backward pass and the step."""
    parameters = [each for each in model.parameters() if each.grad is not None]
    if loop.edit == "clip norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    elif loop.edit == "clip value":
        torch.nn.utils.clip_grad_value_(model.parameters(), LIMIT / 4)
    elif loop.edit == "read":
        assert all(float(each.grad.norm()) < 1e4 for each in parameters)
    for number, each in enumerate(parameters):
        if loop.edit == "scale":
            each.grad.mul_(0.5)
        elif loop.edit == "noise":
            each.grad.add_(0.1 * torch.sin(100 * each.grad.detach() * 0 + number))
        elif loop.edit == "drop" and number % 2:
            each.grad = None


def _prepare(loop: Loop, model: nn.Module) -> None:
    if loop.edit == "hook":
        for each in model.parameters():
            each.register_hook(lambda gradient: gradient * 0.5)


def _begin(loop: Loop, model: nn.Module, number: int) -> None:
    if loop.edit == "freeze" and number == 2 * loop.accumulation:
        model.first.requires_grad_(False)  # type: ignore[union-attr]


def train_plainly(loop: Loop) -> torch.Tensor:
    """Return the weights after the loop in one process, which computes the batches of all ranks."""
    parts = _Parts(loop)
    model, optimizer = parts.model, parts.optimizer
    _prepare(loop, model)
    open_batches = 0
    for number in range(parts.num_batches):
        _begin(loop, model, number)
        if _is_skipped(loop, number):
            continue
        open_batches += 1
        for rank in range(RANKS):
            losses = list(_losses(loop, model, parts.batch(number, rank), _branch(loop, number, rank)))
            (sum(losses) / RANKS).backward()  # type: ignore[union-attr]
        if (number + 1) % loop.accumulation and number + 1 < parts.num_batches:
            continue
        for each in model.parameters():
            if each.grad is not None:
                each.grad /= open_batches
        _change_gradients(loop, model)
        optimizer.step()
        optimizer.zero_grad()
        open_batches = 0
    return _weights(model)


def train(loop: Loop) -> torch.Tensor | str:
    """Return the weights after the loop with the engine, or the error with which it was refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with session_of(rank, size):
        parts = _Parts(loop)
        loader: Any = DataLoader(parts.dataset(), batch_size=parts.rows)
        if loop.is_accelerated:
            strategies = loop.strategies
            loader = raysgd.torch.prepare_data_loader(loader)
            model, optimizer = raysgd.accelerate(parts.model, optimizer=parts.optimizer, **strategies)
            backward: Callable[..., None] = torch.Tensor.backward
        else:
            engine = raysgd.Engine(**loop.strategies)
            model, optimizer, _, loader, _ = engine.compose(
                model=parts.model, optimizer=parts.optimizer, train_dataloader=loader
            )
            backward = engine.backward
        try:
            _run(loop, model, optimizer, loader, backward, rank)
        except RaySGDError as error:
            return f"{type(error).__name__}: {error}"
        return _weights(model)


def _run(loop: Loop, model: Any, optimizer: Any, loader: Any, backward: Callable[..., None], rank: int) -> None:
    inner = unwrap(model)
    _prepare(loop, inner)
    for number, batch in enumerate(loader):
        _begin(loop, inner, number)
        if _is_skipped(loop, number):
            continue
        if loop.edit == "zero_grad first":
            optimizer.zero_grad()
        losses = _losses(loop, model, batch, _branch(loop, number, rank))
        if loop.edit == "two losses":
            first, second = losses
            backward(first, retain_graph=True)
            backward(second)
        else:
            for loss in losses:
                backward(loss)
        _change_gradients(loop, model)
        if loop.edit == "closure":
            optimizer.step(lambda: None)
        optimizer.step()
        if loop.edit == "zero_grad of the model":
            model.zero_grad()
        elif loop.edit != "zero_grad first":
            optimizer.zero_grad()


def _weights(model: nn.Module) -> torch.Tensor:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().float().flatten() for each in whole])


def compare(loops: list[Loop]) -> list[str | float]:
    """Train each loop with the engine and plainly; return how it was refused, or the largest difference of a weight."""
    found: list[str | float] = []
    for loop in loops:
        weights = train(loop)
        if isinstance(weights, str):
            found.append(weights)
            continue
        found.append(float((weights - train_plainly(loop)).abs().max()))
    return found


def table() -> str:
    """Return the table of the guide."""
    names = list(STRATEGIES)
    rows = [["the loop may", *names], ["---"] * (len(names) + 1)]
    rows += [[text, *("no" if is_refused(name, edit) else "yes" for name in names)] for edit, text in EDITS.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
