"""`prepare_optimizer`: the state moves to the devices of the parameters."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from raysgd.errors import ConfigError
from raysgd.torch import prepare_optimizer


def trained(make: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    optimizer.step(*([lambda: loss.detach()] if isinstance(optimizer, torch.optim.LBFGS) else []))
    return model, optimizer


def pretend_to_move(model: nn.Module, optimizer: Any) -> None:
    """Move the parameters alone to ``meta``, as when a model moves to a GPU after its state was loaded on the CPU."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            moved = nn.Parameter(parameter.detach().to("meta"))
            if parameter in optimizer.state:
                optimizer.state[moved] = optimizer.state.pop(parameter)
            group["params"][index] = moved


def devices(optimizer: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(name, set()).add(value.device.type)
    return found


def test_state_moves_to_the_device_of_the_parameters() -> None:
    model, optimizer = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    pretend_to_move(model, optimizer)
    assert prepare_optimizer(optimizer) is optimizer
    assert devices(optimizer) == {"momentum_buffer": {"meta"}}


def test_step_counts_stay_on_the_cpu() -> None:
    model, optimizer = trained(torch.optim.AdamW)
    pretend_to_move(model, optimizer)
    prepare_optimizer(optimizer)
    assert devices(optimizer) == {"step": {"cpu"}, "exp_avg": {"meta"}, "exp_avg_sq": {"meta"}}


def test_step_counts_of_a_fused_optimizer_are_moved() -> None:
    model, optimizer = trained(lambda parameters: torch.optim.AdamW(parameters, fused=True))
    pretend_to_move(model, optimizer)
    prepare_optimizer(optimizer)
    assert devices(optimizer)["step"] == {"meta"}


def test_lists_in_the_state_are_moved() -> None:
    model, optimizer = trained(torch.optim.LBFGS)
    pretend_to_move(model, optimizer)
    prepare_optimizer(optimizer)
    assert devices(optimizer)["d"] == {"meta"}


def test_state_on_the_right_device_is_not_copied() -> None:
    _, optimizer = trained(torch.optim.Adam)
    before = [value for state in optimizer.state.values() for value in state.values()]
    prepare_optimizer(optimizer)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    fresh = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert prepare_optimizer(fresh) is fresh


def test_other_types_than_optimizer_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a Linear"):
        prepare_optimizer(cast(Any, nn.Linear(1, 1)))
