"""A checkpoint that another program loads: what that program gives differently counts, all else is resumed or refused."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedulers

import raysgd
from raysgd.errors import CheckpointError

NUM_FEATURES = 3


def power(exponent: float, step: int) -> float:
    return (step + 1) ** -exponent


class Falling:
    """A function of a LambdaLR that torch saves with its attributes."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def __call__(self, step: int) -> float:
        return power(self.exponent, step)


class InverseRoot(schedulers.LRScheduler):
    """A user's scheduler."""

    def __init__(self, optimizer: Any, exponent: float) -> None:
        self.exponent = exponent
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * power(self.exponent, self.last_epoch) for base in self.base_lrs]


def warmed_up(optimizer: Any, factor: float) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, 0.5, total_iters=3),
        schedulers.LambdaLR(optimizer, functools.partial(power, factor)),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Any, factor: float) -> Any:
    parts = [schedulers.ConstantLR(optimizer, factor, 2), schedulers.ExponentialLR(optimizer, factor)]
    return schedulers.ChainedScheduler(parts)


#: Each makes a scheduler with an argument between 0.2 and 0.9.
SCHEDULERS: dict[str, Callable[[Any, float], Any]] = {
    "StepLR": lambda optimizer, factor: schedulers.StepLR(optimizer, 2, factor),
    "MultiStepLR": lambda optimizer, factor: schedulers.MultiStepLR(optimizer, [1, 4], factor),
    "CosineAnnealingLR": lambda optimizer, factor: schedulers.CosineAnnealingLR(optimizer, 20, factor / 1000),
    "warm restarts": lambda optimizer, factor: schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2, factor / 1000),
    "LambdaLR": lambda optimizer, factor: schedulers.LambdaLR(optimizer, lambda step: power(factor, step)),
    "LambdaLR of an object": lambda optimizer, factor: schedulers.LambdaLR(optimizer, Falling(factor)),
    "OneCycleLR": lambda optimizer, factor: schedulers.OneCycleLR(optimizer, factor / 10, 30),
    "CyclicLR": lambda optimizer, factor: schedulers.CyclicLR(optimizer, factor / 100, factor / 10, 3),
    "PolynomialLR": lambda optimizer, factor: schedulers.PolynomialLR(optimizer, 40, factor),
    "SequentialLR": warmed_up,
    "ChainedScheduler": chained,
    "own": InverseRoot,
}


class Net(nn.Module):
    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(NUM_FEATURES, 4)
        self.head = nn.Linear(4, 1)
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh()).square().mean()


def make_net() -> Net:
    torch.manual_seed(1)
    return Net()


def make_sgd(model: nn.Module, given: Sequence[dict[str, float]]) -> torch.optim.Optimizer:
    """Make SGD with a group of the weights and one of the biases."""
    parameters = list(model.parameters())
    groups = [[each for each in parameters if each.ndim > 1], [each for each in parameters if each.ndim == 1]]
    return torch.optim.SGD([{"params": group, **values} for group, values in zip(groups, given, strict=True)])


def batch(number: int) -> torch.Tensor:
    return torch.randn(5, NUM_FEATURES, generator=torch.Generator().manual_seed(number))


def rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class Loop:
    """A loop with the engine, of which each is a program of its own."""

    def __init__(self, model: nn.Module, optimizer: Any, make_scheduler: Any = None, **strategies: Any) -> None:
        self.engine = raysgd.Engine(**strategies)
        self.model, self.optimizer, self.scheduler, *_ = self.engine.compose(
            model=model, optimizer=optimizer, lr_scheduler_fn=make_scheduler
        )

    def train(self, numbers: Sequence[int], loss_of: Callable[[int], float] = float) -> list[list[float]]:
        """Make steps; returns the rates of each."""
        found = []
        for number in numbers:
            self.optimizer.zero_grad()
            self.engine.backward(self.model(batch(number)))
            found.append(rates(self.optimizer))
            self.optimizer.step()
            if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
                self.scheduler.step(loss_of(number))
            elif self.scheduler is not None:
                self.scheduler.step()
        return found

    def weights(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


def settings_of_groups() -> Any:
    group = st.fixed_dictionaries(
        {
            "lr": st.sampled_from([0.1, 0.05, 0.01]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "momentum": st.sampled_from([0.9, 0.5]),
        }
    )
    return st.tuples(group, group)


Program = tuple[str, float, tuple[dict[str, float], dict[str, float]]]


def make_loop(program: Program) -> Loop:
    name, factor, groups = program
    model = make_net()
    make = None if name == "none" else lambda optimizer: SCHEDULERS[name](optimizer, factor)
    return Loop(model, make_sgd(model, groups), make)


def train_plainly(then: Program, now: Program, num_before: int, num_after: int) -> tuple[list[Any], list[torch.Tensor]]:
    """Train without raysgd: with one program, and on with the other as if it had made the first steps, too."""
    model, found = make_net(), []
    optimizer, scheduler = make_sgd(model, then[2]), None
    for number in range(num_before + num_after):
        if number in (0, num_before):
            name, factor, groups = then if number < num_before else now
            state = optimizer.state
            optimizer = make_sgd(model, groups)
            optimizer.state.update(state)
            scheduler = None if name == "none" else SCHEDULERS[name](optimizer, factor)
            for _ in range(number):
                if scheduler is not None:
                    scheduler.step()
        found.append(rates(optimizer))
        optimizer.zero_grad()
        model(batch(number)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found[num_before:], list(model.parameters())


SAME = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}


@settings(max_examples=120)
@given(
    names=st.sampled_from(["none", *SCHEDULERS]).flatmap(
        lambda name: st.tuples(st.just(name), st.just(name) if name == "none" else st.sampled_from([name, *SCHEDULERS]))
    ),
    factors=st.tuples(st.sampled_from([0.3, 0.6]), st.sampled_from([0.3, 0.6])),
    then=settings_of_groups(),
    now=st.none() | settings_of_groups(),
    num_before=st.integers(0, 12),
)
@example(("LambdaLR", "LambdaLR"), (0.3, 0.6), (SAME, SAME), None, 5)
@example(("none", "none"), (0.3, 0.3), (SAME, SAME), ({**SAME, "lr": 0.01}, SAME), 5)
def test_program_that_resumes_decides_on_its_settings_and_schedule(
    names: tuple[str, str], factors: tuple[float, float], then: Any, now: Any, num_before: int
) -> None:
    first, second = (names[0], factors[0], then), (names[1], factors[1], then if now is None else now)
    with TemporaryDirectory() as folder, raysgd.local(dir=folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        saved = make_loop(first)
        saved.train(range(num_before))
        saved.engine.save_checkpoint()
        loop = make_loop(second)
        loop.engine.load_checkpoint()
        found = loop.train(range(num_before, num_before + 3))
        expected, weights = train_plainly(first, second, num_before, 3)
    assert found == expected
    for own, other in zip(loop.weights(), weights, strict=True):
        assert torch.equal(own, other)


def resume(first: Loop, second: Loop, folder: Path, steps: int = 3) -> None:
    with raysgd.local(dir=folder):
        first.train(range(steps))
        first.engine.save_checkpoint()
        second.engine.load_checkpoint()


def sgd_loop(make_scheduler: Any = None, model: nn.Module | None = None, **values: Any) -> Loop:
    model = make_net() if model is None else model
    return Loop(model, torch.optim.SGD(model.parameters(), **{"lr": 0.1, **values}), make_scheduler)


def test_settings_that_the_loop_has_changed_are_resumed(tmp_path: Path) -> None:
    first, second = sgd_loop(), sgd_loop(momentum=0.5)
    first.optimizer.param_groups[0]["lr"] = 0.02
    first.optimizer.param_groups[0]["own"] = "kept"
    resume(first, second, tmp_path)
    group = second.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["own"]) == (0.02, 0.5, "kept")


def test_settings_that_count_are_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        resume(sgd_loop(), sgd_loop(), tmp_path / "same")
        assert not caplog.messages
        resume(sgd_loop(), sgd_loop(lr=0.01, weight_decay=0.1), tmp_path / "other")
    (line,) = caplog.messages
    assert "they count: lr 0.01 (was 0.1), weight_decay 0.1 (was 0)" in line


def test_settings_of_the_second_resume_are_compared_with_the_first(tmp_path: Path) -> None:
    resume(sgd_loop(), second := sgd_loop(lr=0.01), tmp_path)
    second.optimizer.param_groups[0]["lr"] = 0.003
    resume(second, third := sgd_loop(lr=0.01), tmp_path / "again")
    assert rates(third.optimizer) == [0.003]


@pytest.mark.parametrize("lr", [0.1, 0.4])
def test_reductions_by_a_metric_are_kept_with_another_rate(tmp_path: Path, lr: float) -> None:
    def plateau(optimizer: Any, patience: int = 0) -> Any:
        return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience)

    resume(sgd_loop(plateau), second := sgd_loop(functools.partial(plateau, patience=1), lr=lr), tmp_path)
    assert rates(second.optimizer) == [lr / 4]  # losses 0, 1, 2: two reductions
    assert (second.scheduler.best, second.scheduler.patience) == (0.0, 1)
    assert second.train([3, 4], lambda _: 5.0) == [[lr / 4], [lr / 4]]
    assert rates(second.optimizer) == [lr / 8]


def test_rate_that_is_a_tensor_is_resumed_and_changed(tmp_path: Path) -> None:
    def falling(optimizer: Any) -> Any:
        return schedulers.ExponentialLR(optimizer, 0.5)

    def loop(rate: float) -> Loop:
        model = make_net()
        return Loop(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(rate), capturable=False), falling)

    resume(loop(0.5), same := loop(0.5), tmp_path / "same")
    resume(loop(0.5), other := loop(0.25), tmp_path / "other")
    assert (rates(same.optimizer), rates(other.optimizer)) == ([0.0625], [0.03125])
    assert isinstance(other.optimizer.param_groups[0]["lr"], torch.Tensor)


def test_groups_and_parameters_are_found_by_their_names(tmp_path: Path) -> None:
    def loop(order: int) -> Loop:
        model = make_net()
        groups = [
            {"params": list(model.body.parameters())[::order], "lr": 0.1},
            {"params": model.head.parameters(), "lr": 0.2},
        ]
        return Loop(model, torch.optim.Adam(groups[::order]))

    resume(first := loop(1), second := loop(-1), tmp_path)
    first.train([3])
    second.train([3])
    assert rates(second.optimizer) == [0.2, 0.1]
    for own, other in zip(second.weights(), first.weights(), strict=True):
        assert torch.equal(own, other)


# -- what is refused --------------------------------------------------------------------------------------------------------


def with_adapters() -> Loop:
    return sgd_loop(model=Net(lora_a=nn.Linear(NUM_FEATURES, 2), lora_b=nn.Linear(2, 4)))


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(NUM_FEATURES, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x)).square().mean()


def wider() -> Loop:
    model = make_net()
    model.body, model.head = nn.Linear(NUM_FEATURES, 5), nn.Linear(5, 1)
    return sgd_loop(model=model)


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_FEATURES)
        if is_tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def head_alone() -> Loop:
    model = make_net()
    return Loop(model, torch.optim.SGD(model.head.parameters(), lr=0.1))


def regrouped() -> Loop:
    model = make_net()
    groups = [{"params": [model.body.weight, model.head.weight]}, {"params": [model.body.bias, model.head.bias]}]
    return Loop(model, torch.optim.SGD(groups, lr=0.1))


def adam_loop(**values: Any) -> Loop:
    model = make_net()
    return Loop(model, torch.optim.Adam(model.parameters(), lr=0.1, **values))


def stepped(optimizer: Any) -> Any:
    return schedulers.StepLR(optimizer, 2)


REFUSED: dict[str, tuple[Callable[[], Loop], Callable[[], Loop], str]] = {
    "larger model was saved": (
        with_adapters,
        sgd_loop,
        r"the Net here does not have lora_a\.bias, lora_a\.weight, lora_b\.bias, lora_b\.weight\. Make the same",
    ),
    "adapters were added": (
        sgd_loop,
        with_adapters,
        r"the Net here has in addition lora_a\.bias, lora_a\.weight, lora_b\.bias",
    ),
    "other names": (
        sgd_loop,
        lambda: sgd_loop(model=Renamed()),
        r"does not have body\.bias, body\.weight, and has in addition trunk\.bias, trunk\.weight",
    ),
    "other shapes": (
        sgd_loop,
        wider,
        r"in other shapes body\.bias \(\(4,\) float32 was saved\), body\.weight \(\(4, 3\) float32",
    ),
    "two parameters became one": (
        lambda: sgd_loop(model=Tied(is_tied=False)),
        lambda: sgd_loop(model=Tied(is_tied=True)),
        r"first\.weight and second\.weight are one parameter of the model, and were two when",
    ),
    "another optimizer": (
        sgd_loop,
        adam_loop,
        r"saved by a SGD; the optimizer here is an Adam, which has another state",
    ),
    "fewer parameters": (sgd_loop, head_alone, r"body\.bias, body\.weight are not here, so it cannot be restored"),
    "more parameters": (head_alone, sgd_loop, r"groups of \[2\].*body\.bias, body\.weight were not in it"),
    "other groups": (
        sgd_loop,
        regrouped,
        r"groups of \[4\] parameters.*\[2, 2\]: the same parameters are in other groups",
    ),
    "setting that needs state": (
        adam_loop,
        lambda: adam_loop(amsgrad=True),
        r"Adam\(amsgrad=True\) needs max_exp_avg_sq",
    ),
    "scheduler was added": (
        sgd_loop,
        lambda: sgd_loop(stepped),
        "the checkpoint has no lr_scheduler, because the loop",
    ),
    "scheduler was left out": (
        lambda: sgd_loop(stepped),
        sgd_loop,
        "has the state of a StepLR, and there is no scheduler here",
    ),
    "scheduler that follows a metric": (
        lambda: sgd_loop(stepped),
        lambda: sgd_loop(schedulers.ReduceLROnPlateau),
        "is that of a StepLR; the lr_scheduler here is a ReduceLROnPlateau, which cannot resume from it",
    ),
}


@pytest.mark.parametrize(("make_first", "make_second", "text"), REFUSED.values(), ids=REFUSED)
def test_checkpoint_of_another_program_is_refused_by_name(
    tmp_path: Path, make_first: Callable[[], Loop], make_second: Callable[[], Loop], text: str
) -> None:
    second = make_second()
    before = second.weights()
    with pytest.raises(CheckpointError, match=text):
        resume(make_first(), second, tmp_path)
    assert all(torch.equal(own, other) for own, other in zip(second.weights(), before, strict=True))


def test_parameters_that_were_tied_may_be_two(tmp_path: Path) -> None:
    first, second = (sgd_loop(model=Tied(is_tied=is_tied)) for is_tied in (True, False))
    with pytest.raises(CheckpointError, match=r"second\.weight were not in it"):  # the optimizer has one more
        resume(first, second, tmp_path)
