"""Steps of logical workers in one process: what they compute, and mistakes that would make it depend on the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import raysgd
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context, generators
from raysgd.session.local import LocalSession
from raysgd.session.logical import LogicalWorkers
from raysgd.session.logical_step import LogicalStep

NUM_ROWS = 40


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    states = generators.read()
    torch.manual_seed(0)
    yield
    generators.write(states)


@contextmanager
def session(num_logical: int | None = 4, num_rows: int = NUM_ROWS) -> Iterator[LocalSession]:
    """Run as the only process of a run with so many logical workers."""
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((num_rows, 3)).astype(np.float32), "y": rng.standard_normal(num_rows, np.float32)}
    installed = LocalSession(plan=resolve_datasets(data, put=lambda block: block))
    if num_logical is not None:
        installed.logical = LogicalWorkers(num_logical, 0, 1, 0)
    context.install(installed)
    try:
        yield installed
    finally:
        context.uninstall()


def steps(model: nn.Module, batch_size: int = 5) -> Iterator[LogicalStep[Any]]:
    batches = raysgd.get_dataset().get_split().to_torch(batch_size, label_column="y", feature_columns=["x"])
    return raysgd.torch.logical_steps(batches, model)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - y).square().mean()


def compute(step: LogicalStep[Any], model: nn.Module) -> None:
    for x, y in step:
        loss = loss_of(model, x, y)
        loss.backward()
        step.record(loss=loss)


def all_rows() -> tuple[torch.Tensor, torch.Tensor]:
    batch = raysgd.get_dataset().get_split(whole=True).to_torch(NUM_ROWS).first_batch()
    return batch["x"], batch["y"]


@pytest.mark.parametrize(("num_logical", "num_rows"), [(1, 40), (4, 20), (4, 18), (7, 23), (3, 2), (None, 5)])
def test_gradients_and_metrics_are_means_over_all_rows(num_logical: int | None, num_rows: int) -> None:
    with session(num_logical, num_rows):
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        x, y = all_rows()
        loss = loss_of(model, x, y)
        expected = torch.autograd.grad(loss, list(model.parameters()))
        (step,) = run(steps(model, -(-num_rows // (num_logical or 1))), lambda step: compute(step, model))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert step.means()["loss"] == pytest.approx(loss.item())


def run(found: Iterator[LogicalStep[Any]], body: Callable[[LogicalStep[Any]], None]) -> list[LogicalStep[Any]]:
    done = []
    for step in found:
        body(step)
        done.append(step)
    return done


def test_gradients_accumulate_over_steps() -> None:
    with session():
        model = nn.Linear(3, 1)
        (*_,) = run(steps(model), lambda step: compute(step, model))
        accumulated = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        single = []
        for step in steps(model):
            model.zero_grad()
            compute(step, model)
            single.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        assert len(single) == 2
        torch.testing.assert_close(accumulated, [a + b for a, b in zip(*single, strict=True)])


def test_buffers_become_the_mean_of_those_of_the_logical_workers() -> None:
    with session(num_rows=20):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        x, _ = all_rows()
        run(steps(model), lambda step: compute(step, model))
        parts = x.split(5)
        expected = 0.1 * torch.stack([part.mean(0) for part in parts]).mean(0)
        torch.testing.assert_close(model[0].running_mean, expected)
        torch.testing.assert_close(model[0].running_var, 0.9 + 0.1 * torch.stack([p.var(0) for p in parts]).mean(0))
        assert model[0].num_batches_tracked.item() == 1, "each logical worker begins with the step's buffers"


class Table(nn.Module):
    """A large constant, a counter, and a running value that is another tensor after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)
        self.register_buffer("mask", torch.where(torch.rand(50, 50) < 0.5, -torch.inf, torch.rand(50, 50) / 3))
        self.register_buffer("flags", torch.ones(7, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("running", torch.zeros(3))
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 3
        self.running = 0.5 * self.running + x.detach().mean(0)
        if self.late:
            self.mask.mul_(2)
        return self.layer(x)


def test_other_buffers_follow_and_constants_stay_as_they_are() -> None:
    with session():
        model, x = Table(), all_rows()[0]
        mask = model.mask.clone()
        run(steps(model), lambda step: compute(step, model))
        assert torch.equal(model.mask, mask) and model.count.item() == 2**40 + 2 * 3
        means = [torch.stack([part.mean(0) for part in half.split(5)]).mean(0) for half in x.split(20)]
        torch.testing.assert_close(model.running, 0.5 * means[0] + means[1])
        assert model.unused.weight.grad is None, "a parameter without a gradient must not be decayed by the optimizer"


def test_constant_that_changes_later_is_refused() -> None:
    with session():
        model = Table()
        first, second = steps(model), None
        compute(next(first), model)
        model.late = True
        second = next(first)
        with pytest.raises(UsageError, match="buffer 'mask' of Table changed for the first time"):
            compute(second, model)


def test_parameters_can_be_frozen_between_steps() -> None:
    with session():
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        found = steps(model)
        compute(next(found), model)
        model[0].requires_grad_(False)
        model.zero_grad()
        compute(next(found), model)
        assert model[0].weight.grad is None and model[1].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_types(dtype: torch.dtype) -> None:
    with session(num_rows=20):
        model = nn.Linear(3, 1).to(dtype)
        x, y = all_rows()
        expected = torch.autograd.grad(loss_of(model, x.to(dtype), y.to(dtype)), list(model.parameters()))

        def body(step: LogicalStep[Any]) -> None:
            for x, y in step:
                loss_of(model, x.to(dtype), y.to(dtype)).backward()

        run(steps(model), body)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None and parameter.grad.dtype == dtype
            torch.testing.assert_close(parameter.grad, gradient)


def test_random_numbers_are_those_of_the_logical_worker_and_continue_from_a_checkpoint() -> None:
    def draws(num_steps: int, state: Any = None) -> tuple[list[float], Any]:
        found = []
        with session() as installed:
            assert installed.logical is not None
            if state is not None:
                installed.logical.restore(state)
            model = nn.Linear(3, 1)
            for step in islice(chain(steps(model), steps(model)), num_steps):
                for x, y in step:
                    found.append((step.logical_rank, torch.rand(1).item()))
                    loss_of(model, x, y).backward()
            return found, installed.logical.to_json()

    whole, _ = draws(3)
    first, state = draws(1)
    torch.manual_seed(99)  # between the steps: it does not matter to the logical workers
    assert first + draws(2, state)[0] == whole
    assert len(set(whole)) == 12


def optimizer_step_inside(step: LogicalStep[Any], model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in step:
        loss_of(model, x, y).backward()
        optimizer.step()


def leaves_early(step: LogicalStep[Any], model: nn.Module) -> None:
    for _ in step:
        break


def records_other_names(step: LogicalStep[Any], model: nn.Module) -> None:
    for number, (x, y) in enumerate(step):
        loss_of(model, x, y).backward()
        step.record(**{"a" if number else "b": 1.0})


def reads_means_inside(step: LogicalStep[Any], model: nn.Module) -> None:
    for _ in step:
        step.means()


def records_too_much(step: LogicalStep[Any], model: nn.Module) -> None:
    for _ in step:
        step.record(**{f"m{i}": i for i in range(33)})


def saves_inside(step: LogicalStep[Any], model: nn.Module) -> None:
    for _ in step:
        installed = context.installed()
        assert installed is not None and installed.logical is not None
        installed.logical.check_outside("save_checkpoint()")


MISTAKES = {
    optimizer_step_inside: "weights changed in the loop",
    leaves_early: "was left before its end",
    lambda step, model: None: "was never entered",
    records_other_names: "record the same metrics",
    reads_means_inside: "known after the loop",
    records_too_much: "up to 32 metrics",
    saves_inside: "call it after that loop",
    lambda step, model: step.record(loss=1): "belongs into the loop",
    lambda step, model: step.logical_rank: "only in the loop",
    lambda step, model: (compute(step, model), compute(step, model)): "iterated over once",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: Any) -> None:
    with session() as installed:
        model = nn.Linear(3, 1)
        with pytest.raises(UsageError, match=MISTAKES[mistake]):
            run(steps(model), lambda step: mistake(step, model))
        assert installed.logical is not None and installed.logical.acting is None


def test_what_cannot_be_trained_by_logical_workers_is_refused() -> None:
    with session():
        wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
        with pytest.raises(ConfigError, match="give the plain module"):
            steps(wrapped)
        with pytest.raises(ConfigError, match="to_torch"):
            raysgd.torch.logical_steps([1, 2], nn.Linear(3, 1))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="complex64"):
            steps(nn.Linear(3, 1, dtype=torch.complex64))
        with pytest.raises(ConfigError, match="nothing is trained"):
            steps(nn.Identity())
        with pytest.raises(ConfigError, match="with a plain model"):
            raysgd.Engine()
        with pytest.raises(ConfigError, match="DataLoader"):
            raysgd.torch.prepare_data_loader(torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    def body(step: LogicalStep[Any]) -> None:
        for _ in step:
            model(torch.tensor([1])).sum().backward()

    with session():
        model = nn.Embedding(5, 1, sparse=True)
        with pytest.raises(ConfigError, match="sparse=False"):
            run(steps(model), body)


def test_model_is_not_wrapped() -> None:
    with session():
        model = nn.Linear(3, 1)
        assert raysgd.torch.prepare_model(model) is model


def test_checksums_differ_by_one_bit() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = raysgd.torch.checksums(model)
    assert list(before) == [f"checksum/{name}" for name in model.state_dict()]
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nextafter(model[0].weight[0, 0], torch.tensor(9.0))
    after = raysgd.torch.checksums(model)
    assert [name for name in before if before[name] != after[name]] == ["checksum/0.weight"]


def test_checkpoint_within_an_epoch_has_the_rows_of_the_steps_that_were_computed(tmp_path: Path) -> None:
    data, model = {"x": np.ones((40, 3), np.float32), "y": np.ones(40, np.float32)}, nn.Linear(3, 1)
    with raysgd.local(dataset=data, dir=tmp_path):
        epoch = steps(model)
        for step in islice(epoch, 3):
            compute(step, model)
        raysgd.save_checkpoint({"model": model})
        epoch.close()  # type: ignore[attr-defined]
    with raysgd.local(dataset=data, dir=tmp_path):
        raysgd.load_checkpoint()
        assert len(run(steps(model), lambda step: compute(step, model))) == 40 // 5 - 3
