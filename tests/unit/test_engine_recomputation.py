"""Activation checkpointing with blocks that change buffers and attributes in their forward pass: they train as without it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raysgd

pytestmark = pytest.mark.usefixtures("group")

STEPS = 4


class Block(nn.Module):
    """A block that normalizes by statistics of its own, draws random numbers, and counts in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.num_calls, self.total = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
            self.steps += 1
            self.table = self.table + 1
            self.total += 1
        self.num_calls += 1
        x = self.dropout(self.norm(self.linear(x))) / self.scale.clone()
        return x.tanh() if self.num_calls % 2 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def backward_once(model: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    backward(model(x).square().mean())


def backward_of_two_losses(model: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    y = model(x)
    backward(y.square().mean(), retain_graph=True)
    backward(y.abs().mean())


def backward_with_gradient_penalty(model: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    x.requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    backward(y.square().mean() + gradient.square().mean())


def backward_after_evaluation(model: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    loss = model(x).square().mean()
    model.eval()
    with torch.no_grad():
        model(x)
    backward(loss)
    model.train()


def backward_of_two_passes(model: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    backward(model(x).square().mean() + model(x + 1).square().mean())


def train(strategies: dict[str, Any] | None, make_pass: Callable[..., None]) -> dict[str, torch.Tensor]:
    """Train by the plain loop or under strategies; return weights, buffers and counts."""
    model: Any = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    backward: Callable[..., None] = torch.Tensor.backward
    if strategies is not None:
        engine = raysgd.Engine(**strategies)
        model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
        backward = engine.backward
    for number in range(STEPS):
        torch.manual_seed(number)
        make_pass(model, torch.randn(8, 4), backward)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}
    layer = model.layers[0]
    return {**state, "table": layer.table, "total": layer.total, "num_calls": torch.tensor(layer.num_calls)}


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize(
    "make_pass",
    [
        backward_once,
        backward_of_two_losses,
        backward_with_gradient_penalty,
        backward_after_evaluation,
        backward_of_two_passes,
    ],
)
def test_recomputed_blocks_train_as_those_that_are_not(kind: str, make_pass: Callable[..., None]) -> None:
    plain, found = train(None, make_pass), train({"activation_checkpointing": kind}, make_pass)
    assert plain.keys() == found.keys()
    assert [name for name, value in plain.items() if not torch.equal(value, found[name])] == []


def test_statistics_of_recomputed_blocks_count_each_batch_once_with_zero_3() -> None:
    found = train({"activation_checkpointing": "full", "zero_stage": 3}, backward_once)
    assert int(found["layers.1.norm.num_batches_tracked"]) == int(found["layers.0.steps"]) == STEPS
    for name, value in train(None, backward_once).items():
        torch.testing.assert_close(found[name], value)


def test_recomputed_block_keeps_no_results_of_earlier_steps() -> None:
    class Keeping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.kept = y.square()  # is not part of the loss, so that its graph stays
            return y

    model: Any = nn.Sequential(Keeping(4, 4), Keeping(4, 4))
    engine = raysgd.Engine(activation_checkpointing="full")
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    kept = []
    for _ in range(4):
        engine.backward(model(torch.randn(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
        kept.append(weakref.ref(model[0].kept))
    gc.collect()
    assert [each() is None for each in kept] == [True, True, True, False]
