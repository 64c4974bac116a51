"""A loop may read batches when it likes: which of them are in which step does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd.errors import UsageError

pytestmark = pytest.mark.usefixtures("group")

ROWS, SIZE, STEPS, EPOCHS = 21, 2, 4, 2  # 11 batches: the last step of an epoch has three, the last batch one row
SKIPPED = (1, 3, 4)


def make_loader() -> DataLoader[Any]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=SIZE)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


# -- when batches are read ---------------------------------------------------------------------------------------------


def one_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    ahead = next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        yield batch


def in_groups(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    while group := list(islice(batches, STEPS)):
        yield from group


def in_larger_groups(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    while group := list(islice(batches, STEPS + 1)):
        yield from group


READERS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "plain": iter,
    "one ahead": one_ahead,
    "in groups": in_groups,
    "in larger groups": in_larger_groups,
    "a list": list,
}


# -- what the loop does with batches -----------------------------------------------------------------------------------


def by_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    for part in model:
        x = part(x)
    return x


#: Returns the losses of a batch, none if it is left out; of the plain loop and of the engine's.
HABITS: dict[str, Callable[[Any, int, torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {
    "plain": lambda model, number, x, y: [(model(x) - y).square().mean()],
    "changes inputs": lambda model, number, x, y: [(model(x * 2) - y).square().mean()],
    "calls parts of the model": lambda model, number, x, y: [(by_parts(model, x) - y).square().mean()],
    "leaves out batches": lambda model, number, x, y: [] if number in SKIPPED else [(model(x) - y).square().mean()],
    "leaves out batches by their loss": lambda model, number, x, y: (
        [loss for loss in [(model(x) - y).square().mean()] if number not in SKIPPED]
    ),
    "two losses": lambda model, number, x, y: [(model(x) - y).square().mean(), (model(x[1:]) - y[:1]).square().sum()],
    "two losses of other inputs": lambda model, number, x, y: [
        (model(x) - y).square().mean(),
        model(torch.full((1, 3), float(number))).square().mean(),
    ],
    "two losses of a graph": lambda model, number, x, y: (
        lambda found: [(found - y).square().mean(), found.abs().mean()]
    )(model(x)),
}
#: With these the tensors of the loader do not say which batch a pass is of.
UNKNOWN = ("changes inputs", "calls parts of the model")


def train_plainly(habit: str, *, is_weighted: bool) -> torch.Tensor:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(EPOCHS):
        loader, count, weight = make_loader(), 0, 0.0
        for number, (x, y) in enumerate(loader):
            count += 1
            losses = HABITS[habit](model, number, x, y)
            own = len(x) if is_weighted else 1
            for loss in losses:
                (loss * own).backward(retain_graph=habit.endswith("of a graph"))
            weight += own * bool(losses)
            if losses and (count >= STEPS or number + 1 == len(loader)):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= weight
                optimizer.step()
                optimizer.zero_grad()
                count, weight = 0, 0.0
    return weights(model)


def train(reads: str, habit: str, *, steps_each_batch: bool, is_weighted: bool) -> torch.Tensor:
    engine, model = raysgd.Engine(accumulation_steps=STEPS, weighted_gradients=is_weighted), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, _, loader, _ = engine.compose(model=model, optimizer=optimizer, train_dataloader=make_loader())
    kept = []
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(READERS[reads](loader)):
            kept.append(y)  # as for a metric of the epoch
            losses = HABITS[habit](model, number, x, y)
            for loss in losses:
                engine.backward(loss, retain_graph=loss is losses[0] and habit.endswith("of a graph"))
            if losses and (steps_each_batch or optimizer.is_complete):
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("reads", READERS)
def test_steps_have_the_batches_of_the_plain_loop_whenever_batches_are_read(reads: str, habit: str) -> None:
    for is_weighted in (False, True):
        expected = train_plainly(habit, is_weighted=is_weighted)
        for steps_each_batch in (False, True):
            if reads != "plain" and habit in UNKNOWN:
                with pytest.raises(UsageError, match=r"read batches ahead.*engine\.begin_batch"):
                    train(reads, habit, steps_each_batch=steps_each_batch, is_weighted=is_weighted)
                continue
            found = train(reads, habit, steps_each_batch=steps_each_batch, is_weighted=is_weighted)
            assert torch.allclose(found, expected, atol=1e-5), (is_weighted, steps_each_batch)


@pytest.mark.parametrize("reads", READERS)
def test_model_may_be_called_for_several_batches_before_their_backward_passes(reads: str) -> None:
    engine, model = raysgd.Engine(accumulation_steps=STEPS), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, _, loader, _ = engine.compose(model=model, optimizer=optimizer, train_dataloader=make_loader())
    for _ in range(EPOCHS):
        batches = iter(READERS[reads](loader))
        while pair := list(islice(batches, 2)):
            for loss in [(model(x) - y).square().mean() for x, y in pair]:
                engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert torch.allclose(weights(model), train_plainly("plain", is_weighted=False), atol=1e-5)


def test_passes_in_another_order_than_that_of_the_batches_are_refused() -> None:
    engine, model = raysgd.Engine(accumulation_steps=STEPS), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, _, loader, _ = engine.compose(model=model, optimizer=optimizer, train_dataloader=make_loader())
    first, second = [(model(x) - y).square().mean() for x, y in islice(loader, 2)]
    engine.backward(second)
    with pytest.raises(UsageError, match=r"not made in the order in which the batches were read"):
        engine.backward(first)
