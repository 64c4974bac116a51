"""Buffers of several ranks: those of rank 0 are the model's. Rank 0 evaluates alone; and checkpoints have one rank's buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import raysgd
from raysgd.torch import prepare_model
from support.group_sessions import group_session
from support.torch_ranks import RankGroup

RANKS = 2
STEPS = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(RANKS) as group:
        yield group


class Model(nn.Module):
    """A model that uses statistics of earlier batches in training, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x / self.scale)).tanh())
        if self.training:
            self.scale = self.scale * 0.9 + x.detach().abs().mean() * 0.1  # another tensor
            self.seen += (x.detach() > 0).sum(0)
        return y


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * number + rank)) + rank


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = torch.stack([model(batch(number, 0)) for number in (90, 91, 92)])
    model.train()
    return found


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
        for name, each in model.state_dict().items()
    }


def train_plainly(num_batches: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Train in one process as DDP is defined: ranks begin a step with the buffers of rank 0, and average their gradients."""
    model, outputs = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        models = [copy.deepcopy(model) for _ in range(RANKS)]
        for rank, each in enumerate(models):
            each.zero_grad()
            for number in range(num_batches):
                (each(batch(num_batches * step + number, rank)).square().mean() / num_batches / RANKS).backward()
        for parameter, *others in zip(model.parameters(), *(each.parameters() for each in models), strict=True):
            parameter.grad = torch.stack([one.grad for one in others if one.grad is not None]).sum(0)
        optimizer.step()
        for name, buffer in models[0].named_buffers():
            model.get_buffer(name).copy_(buffer)
        outputs.append(evaluated(model))
    return state_of(model), outputs


def train(
    folder: Path, strategies: dict[str, Any] | None, num_batches: int, evaluates: str
) -> tuple[dict[str, Any], list[Any]]:
    """Train under strategies of the engine, or by `prepare_model`; rank 0 evaluates after each step, or all ranks do."""
    with group_session(folder) as session:
        model: Any = Model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        backward: Callable[..., Any] = torch.Tensor.backward
        if strategies is None:
            model = prepare_model(model)
        else:
            engine = raysgd.Engine(**strategies, accumulation_steps=num_batches)
            model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
            backward = engine.backward
        rank, outputs = session.identity.world_rank, []
        for step in range(STEPS):
            for number in range(num_batches):
                if strategies is None:
                    model.require_backward_grad_sync = number == num_batches - 1  # what no_sync() sets
                loss = model(batch(num_batches * step + number, rank)).square().mean()
                backward(loss / num_batches if strategies is None else loss)
                if strategies is not None:
                    optimizer.step()
            if strategies is None:
                optimizer.step()
            optimizer.zero_grad()
            if evaluates == "all" or rank == 0:
                outputs.append(evaluated(model))
            raysgd.barrier()
        return {name: value.numpy() for name, value in state_of(model).items()}, [each.numpy() for each in outputs]


STRATEGIES = [None, {}, {"zero_stage": 1}, {"zero_stage": 2}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("evaluates", ["all", "rank 0"])
@pytest.mark.parametrize("strategies", [*STRATEGIES, {"zero_stage": 3}], ids=str)
def test_ranks_train_and_evaluate_with_the_buffers_of_rank_0(
    ranks: RankGroup, tmp_path: Path, strategies: dict[str, Any] | None, evaluates: str, num_batches: int
) -> None:
    if strategies == {"zero_stage": 3} and evaluates == "rank 0":
        pytest.skip("parameters are gathered by all ranks together")
    expected, outputs = train_plainly(num_batches)
    for rank, (state, found) in enumerate(ranks.run(train, tmp_path, strategies, num_batches, evaluates)):
        for name, value in expected.items():
            numpy.testing.assert_allclose(state[name], value, 1e-5, 1e-6, err_msg=f"{name} of rank {rank}")
        assert len(found) == (STEPS if evaluates == "all" or rank == 0 else 0)
        for one, other in zip(found, outputs, strict=False):
            numpy.testing.assert_allclose(one, other, 1e-5, 1e-6)


def save_within_step(folder: Path, strategies: dict[str, Any]) -> dict[str, Any]:
    with group_session(folder) as session:
        engine, model = raysgd.Engine(**strategies, accumulation_steps=2), Model()
        model, *_ = engine.compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
        engine.backward(model(batch(0, session.identity.world_rank)).square().mean())
        own = {name: each.clone().numpy() for name, each in model.named_buffers()}
        engine.save_checkpoint()
        return own


@pytest.mark.parametrize("strategies", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}], ids=str)
def test_checkpoint_within_a_step_has_the_buffers_of_rank_0(
    ranks: RankGroup, tmp_path: Path, strategies: dict[str, Any]
) -> None:
    first, second = ranks.run(save_within_step, tmp_path, strategies)
    assert first["scale"] != second["scale"]
    (path,) = [each for each in tmp_path.iterdir() if each.is_dir()]
    saved = raysgd.load_checkpoint(path)["model"]
    for name, value in first.items():
        numpy.testing.assert_array_equal(saved[name][...], value)


def forward_unevenly(folder: Path) -> list[float]:
    with group_session(folder) as session:
        model: Any = prepare_model(Model())
        rank = session.identity.world_rank
        with model.no_sync():
            for number in range(1 + rank):  # ranks may accumulate different numbers of batches
                model(batch(number, rank)).mean().backward()
        model(batch(5, rank)).mean().backward()
        return [float(model.scale), float(model.norm.running_mean.sum())]


def test_ranks_may_accumulate_different_numbers_of_batches_by_no_sync(ranks: RankGroup, tmp_path: Path) -> None:
    first, second = ranks.run(forward_unevenly, tmp_path)
    assert first == second


def train_with_buffers_left_alone(folder: Path) -> float:
    with group_session(folder) as session:
        model: Any = prepare_model(Model(), ddp_kwargs={"broadcast_buffers": False})
        model(batch(0, session.identity.world_rank)).mean().backward()
        return float(model.scale)


def test_buffers_stay_those_of_each_rank_on_request(ranks: RankGroup, tmp_path: Path) -> None:
    first, second = ranks.run(train_with_buffers_left_alone, tmp_path)
    assert first != second
