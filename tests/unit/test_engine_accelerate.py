"""`raysgd.accelerate` in a world of one: plain loops stay as they are, and what cannot be used is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raysgd
from raysgd.errors import ConfigError, UnknownArgumentError, UsageError

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * X[:, 1:2]

pytestmark = pytest.mark.usefixtures("group")


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, criterion: nn.Module, passes: int = 1) -> list[float]:
    """Return the losses of a loop that knows nothing of raysgd; ``passes`` backward passes make a step."""
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        for part in range(passes):
            loss = criterion(model(X[part::passes]), Y[part::passes]) / passes
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def train_plainly(passes: int = 1) -> list[float]:
    model = make_model()
    return train(model, make_optimizer(model), nn.MSELoss(), passes)


STRATEGIES = [
    {},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"activation_checkpointing": "full"},
    {"clip_grad_norm": 1e6},
]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("strategies", STRATEGIES, ids=str)
def test_losses_are_those_of_the_plain_loop(strategies: dict[str, Any], passes: int) -> None:
    criterion, model = nn.MSELoss(), make_model()
    model, optimizer = raysgd.accelerate(model, criterion, optimizer=make_optimizer(model), **strategies)
    assert train(model, optimizer, criterion, passes) == pytest.approx(train_plainly(passes), rel=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_fp16_losses_are_not_scaled_and_follow_the_plain_loop(zero_stage: int) -> None:
    criterion, model = nn.MSELoss(), make_model()
    model, optimizer = raysgd.accelerate(
        model,
        criterion,
        optimizer=make_optimizer(model),
        mixed_precision="fp16",
        zero_stage=zero_stage,
        loss_scale=1024.0,
    )
    losses = train(model, optimizer, criterion)
    assert losses == pytest.approx(train_plainly(), rel=0.02) and losses != train_plainly()


def test_overflow_skips_a_step_and_lowers_the_scale() -> None:
    criterion, model = nn.MSELoss(), make_model()
    model, optimizer = raysgd.accelerate(
        model, criterion, optimizer=make_optimizer(model), mixed_precision="fp16", loss_scale=2.0**40
    )
    before = model[0].weight.detach().clone()
    criterion(model(X), Y).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    optimizer.zero_grad()
    for _ in range(30):
        criterion(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model[0].weight, before)


def test_model_alone_is_returned_without_an_optimizer() -> None:
    model = raysgd.accelerate(make_model(), nn.MSELoss(), mixed_precision=True)
    losses = train(model, make_optimizer(model), nn.MSELoss())
    assert losses == pytest.approx(train_plainly(), rel=0.02) and losses != train_plainly()
    assert model(X).dtype == torch.float32


def test_optimizer_of_a_sharded_model_is_made_afterwards() -> None:
    model = make_model()
    early = make_optimizer(model)
    model = raysgd.accelerate(model, zero_stage=3)
    assert train(model, make_optimizer(model), nn.MSELoss()) == pytest.approx(train_plainly(), rel=1e-6)
    with pytest.raises(UsageError, match=r"AdamW was made before accelerate\(zero_stage=3\)"):
        early.step()


def test_gradients_may_be_dropped_without_a_step() -> None:
    criterion, model = nn.MSELoss(), make_model()
    model, optimizer = raysgd.accelerate(model, criterion, optimizer=make_optimizer(model), zero_stage=2)
    criterion(model(X) * 100, Y).backward()
    optimizer.zero_grad()
    assert train(model, optimizer, criterion) == pytest.approx(train_plainly(), rel=1e-6)


def test_weights_loaded_later_are_trained_on() -> None:
    criterion, model, other = nn.MSELoss(), make_model(), make_model()
    model, optimizer = raysgd.accelerate(model, criterion, optimizer=make_optimizer(model), zero_stage=1)
    train(model, optimizer, criterion)
    model.load_state_dict(other.state_dict())
    criterion(model(X), Y).backward()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_users_scheduler_may_be_of_either_optimizer() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer = raysgd.accelerate(model, optimizer=optimizer)
    late = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    model(X).mean().backward()
    optimizer.step()
    early.step()
    late.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_of_the_model_alone(copy_of: Callable[[Any], Any]) -> None:
    criterion, model = nn.MSELoss(), make_model()
    model, optimizer = raysgd.accelerate(
        model, criterion, optimizer=make_optimizer(model), mixed_precision="bf16", activation_checkpointing="full"
    )
    train(model, optimizer, criterion)
    copied, copied_optimizer = copy_of((model, optimizer))
    assert type(copied_optimizer) is torch.optim.AdamW
    plain = make_model()
    plain.load_state_dict(copied.state_dict())
    assert torch.equal(copied(X), plain(X)) and not torch.equal(copied(X), model(X))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mixed_precision": "fp8"}, "mixed_precision='fp8' is not known; give True, False"),
    ({"mixed_precision": "fp16"}, r"divide the gradients by that scale: write model, optimizer = raysgd.accelerate\("),
    ({"zero_stage": 1}, "zero_stage=1.* divides the optimizer's state, and there is no optimizer"),
    ({"zero_stage": 2}, "zero_stage=2.* divides the optimizer's state, and there is no optimizer"),
    ({"zero_stage": 5}, "zero_stage=5 is not known; give 0, 1, 2 or 3"),
    ({"clip_grad_norm": 1.0}, "clip_grad_norm=.* acts in the optimizer's step"),
    ({"precision": "bf16"}, "give mixed_precision=True"),
    ({"accumulation_steps": 2}, "several times before optimizer.step"),
    ({"tensor_parallel": 2}, "acts in the optimizer's step"),
    ({"loss": 3}, "loss is an int; give the criterion"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_used_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raysgd.accelerate(make_model(), **arguments)


def test_strategy_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownArgumentError, match="activation_checkpointing"):
        raysgd.accelerate(make_model(), activation_checkpoint="full")


@pytest.mark.parametrize("loss", [None, nn.functional.mse_loss])
def test_fp16_without_a_module_as_criterion_is_refused(loss: Any) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"give an nn.Module such as nn.MSELoss\(\)"):
        raysgd.accelerate(model, loss, optimizer=make_optimizer(model), mixed_precision="fp16")


def test_fp16_loss_that_is_not_the_criterions_is_refused() -> None:
    model = make_model()
    model, _ = raysgd.accelerate(
        model, nn.MSELoss(), optimizer=make_optimizer(model), mixed_precision="fp16", loss_scale=1024.0
    )
    with pytest.raises(UsageError, match="not scaled"):
        model(X).mean().backward()


def test_step_without_a_backward_pass_through_the_model_is_refused() -> None:
    inner = make_model()
    _, optimizer = raysgd.accelerate(inner, optimizer=make_optimizer(inner))
    optimizer.step()  # nothing to do, as in torch
    inner[2](torch.randn(3, 16)).mean().backward()
    with pytest.raises(UsageError, match=r"no backward pass came through model"):
        optimizer.step()
