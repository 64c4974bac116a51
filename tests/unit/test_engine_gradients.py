"""Clipping: which gradients are scaled, and by which norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raysgd
from support.tiny_models import loss_of, make_model, weights

pytestmark = pytest.mark.usefixtures("group")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def composed(**strategies: Any) -> tuple[raysgd.Engine, Any, Any]:
    engine, model = raysgd.Engine(**strategies), make_model()
    composed, optimizer, *_ = engine.compose(model=model, optimizer=sgd(model))
    return engine, composed, optimizer


def gradients(model: nn.Module) -> list[float]:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).tolist()


@pytest.mark.parametrize("max_norm", [0.01, 1e3])
@pytest.mark.parametrize("strategies", [{}, {"precision": "fp16", "loss_scale": 64.0}], ids=str)
def test_only_gradients_above_the_norm_are_clipped(max_norm: float, strategies: dict[str, Any]) -> None:
    plain = make_model()
    loss_of(plain, 0).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    assert 0.01 < expected < 1e3
    engine, model, _ = composed(**strategies)
    engine.backward(loss_of(model, 0))
    assert float(engine.clip_grad_norm_(max_norm)) == pytest.approx(float(expected), rel=2e-2)
    assert gradients(model) == pytest.approx(gradients(plain), rel=5e-2, abs=1e-3 * min(max_norm, float(expected)))


@pytest.mark.parametrize("max_norm", [0.01, 1e3])
def test_step_is_that_of_gradients_of_which_only_those_above_the_norm_are_clipped(max_norm: float) -> None:
    plain = make_model()
    loss_of(plain, 0).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    sgd(plain).step()
    engine, model, optimizer = composed(clip_grad_norm=max_norm)
    engine.backward(loss_of(model, 0))
    optimizer.step()
    assert weights(model) == pytest.approx(weights(plain), rel=1e-6)


def multiply_in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(4)


def replace(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 4


def replace_after_the_old_one_is_freed(parameter: nn.Parameter) -> None:
    """Python gives the new tensor the address of the old one, which has as many changes."""
    assert parameter.grad is not None
    copy = parameter.grad.clone()
    parameter.grad = None
    new = copy * 4
    parameter.grad = new.mul_(1)


@pytest.mark.parametrize("change", [multiply_in_place, replace, replace_after_the_old_one_is_freed])
def test_norm_is_that_of_the_gradients_as_the_loop_left_them(change: Callable[[nn.Parameter], None]) -> None:
    engine, model = raysgd.Engine(precision="fp16", loss_scale=64.0), nn.Linear(3, 1, bias=False)
    model, *_ = engine.compose(model=model, optimizer=sgd(model))  # type: ignore[arg-type]
    engine.backward(loss_of(model, 0))
    before = float(engine.clip_grad_norm_(float("inf")))
    change(model.weight)
    assert float(engine.clip_grad_norm_(float("inf"))) == pytest.approx(4 * before, rel=1e-5)
    assert float(engine.clip_grad_norm_(before)) == pytest.approx(4 * before, rel=1e-5)
    assert float(engine.clip_grad_norm_(float("inf"))) == pytest.approx(before, rel=1e-4)
