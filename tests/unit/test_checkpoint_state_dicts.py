"""Modules, optimizers and schedulers are saved by their state_dict, without the prefixes of wrappers."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import raysgd
from raysgd.checkpoint.codecs.frameworks import extract_states
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.errors import UnsafeStateError
from support.groups import group_of_one
from support.payloads import load_payload

OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def round_trip(state: Any) -> Any:
    pool = StagingPool()
    snapshot = take_snapshot(state, pool)
    payload = snapshot.payload().copy()
    snapshot.release()
    return load_payload(payload)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 2, bias=False))


def backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    value = model(inputs).square().mean()
    value.backward()
    if isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in model.parameters():
            parameter.grad = parameter.grad.to_sparse()
    return value


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.step(functools.partial(backward, model, optimizer, torch.randn(8, 4, generator=generator)))


def test_extract_states_returns_what_a_checkpoint_would_hold() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1, seed=1)
    state = (torch.nn.DataParallel(model), {"optimizer": optimizer, "epochs": [1, None]})
    given, saved = extract_states(state), round_trip(state)
    assert list(given[0]) == list(saved[0]) and given[0]._metadata == saved[0]._metadata
    assert all(torch.equal(given[0][name], saved[0][name]) for name in saved[0])
    assert given[1].keys() == saved[1].keys() and given[1]["epochs"] == [1, None]
    torch.optim.Adam(model.parameters()).load_state_dict(given[1]["optimizer"])


def test_extract_states_returns_plain_state_itself() -> None:
    state = {"model": make_model().state_dict(), "lists": [1, (2.0, "a")]}
    assert extract_states(state) is state


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_training_continues_bit_identical_with_every_optimizer(kind: Any) -> None:
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.01)
    train(model, optimizer, 3, seed=1)
    loaded = round_trip({"model": model, "optimizer": optimizer})
    other = make_model()
    other_optimizer = kind(other.parameters(), lr=0.5)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, 3, seed=2)
    train(other, other_optimizer, 3, seed=2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"foreach": False},
        {"fused": True},
        {"capturable": False, "lr": torch.tensor(0.01)},
        {"maximize": True},
    ],
    ids=str,
)
def test_options_of_adam_are_restored(options: dict[str, Any]) -> None:
    model = make_model()
    groups = [{"params": [model[0].weight], "lr": 0.1, "name": "first"}, {"params": [model[2].weight]}]
    optimizer = torch.optim.Adam(groups, **options)
    train(model, optimizer, 2, seed=1)
    loaded = round_trip(optimizer)
    assert repr(loaded) == repr(optimizer.state_dict())


class Doubling:
    """A callable with state, as LambdaLR and CyclicLR keep it."""

    def __init__(self) -> None:
        self.base = 2.0

    def __call__(self, step: float) -> float:
        return self.base**-step


def make_schedulers(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    yield schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    yield schedulers.LambdaLR(optimizer, Doubling())
    yield schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.9)
    yield schedulers.StepLR(optimizer, 2)
    yield schedulers.MultiStepLR(optimizer, [2, 3])
    yield schedulers.ConstantLR(optimizer)
    yield schedulers.LinearLR(optimizer)
    yield schedulers.ExponentialLR(optimizer, 0.9)
    yield schedulers.PolynomialLR(optimizer)
    yield schedulers.CosineAnnealingLR(optimizer, 5)
    yield schedulers.CosineAnnealingWarmRestarts(optimizer, 5)
    yield schedulers.CyclicLR(optimizer, 0.1, 0.2)
    yield schedulers.CyclicLR(optimizer, 0.1, 0.2, scale_fn=lambda x: 0.5, scale_mode="cycle")
    yield schedulers.CyclicLR(optimizer, 0.1, 0.2, scale_fn=Doubling(), scale_mode="cycle")
    yield schedulers.OneCycleLR(optimizer, 0.1, total_steps=10)
    yield schedulers.OneCycleLR(optimizer, 0.1, total_steps=10, anneal_strategy="linear", three_phase=True)
    yield schedulers.ReduceLROnPlateau(optimizer)
    yield schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 5)], [2]
    )
    yield schedulers.ChainedScheduler([schedulers.StepLR(optimizer, 2), schedulers.ExponentialLR(optimizer, 0.9)])
    yield torch.optim.swa_utils.SWALR(optimizer, 0.05)


def make_scheduler(index: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1, momentum=0.9)
    return optimizer, list(make_schedulers(optimizer))[index]


def advance(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[Any]:
    rates = []
    for step in range(steps):
        optimizer.step()
        scheduler.step(1.0 + step) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


NAMES = [
    type(s).__name__
    for s in make_schedulers(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9))
]


def test_all_schedulers_of_torch_are_covered() -> None:
    known = {
        name
        for name, kind in vars(schedulers).items()
        if inspect.isclass(kind) and issubclass(kind, schedulers.LRScheduler)
    }
    assert known - set(NAMES) <= {"LRScheduler", "_LRScheduler"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("index", range(len(NAMES)), ids=lambda i: f"{NAMES[i]}-{i}")
def test_every_scheduler_continues(index: int) -> None:
    optimizer, scheduler = make_scheduler(index)
    advance(optimizer, scheduler, 3)
    loaded = round_trip({"optimizer": optimizer, "scheduler": scheduler})
    assert repr(loaded["scheduler"]) == repr(scheduler.state_dict())
    other_optimizer, other = make_scheduler(index)
    other_optimizer.load_state_dict(loaded["optimizer"])
    other.load_state_dict(loaded["scheduler"])
    assert advance(other_optimizer, other, 4) == advance(optimizer, scheduler, 4)


def test_state_dict_with_a_function_is_refused_with_its_place() -> None:
    class Old:
        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": 3, "anneal_func": len}

    with pytest.raises(UnsafeStateError, match=r"state\['scheduler'\]\['anneal_func'\]"):
        round_trip({"scheduler": Old()})


def test_grad_scalers_and_averaged_models_are_restored() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    average = torch.optim.swa_utils.AveragedModel(make_model())
    loaded = round_trip({"scaler": scaler, "average": average})
    assert loaded["scaler"] == scaler.state_dict()
    torch.optim.swa_utils.AveragedModel(make_model()).load_state_dict(loaded["average"])


def test_versions_of_modules_are_restored() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    state = round_trip(model)
    assert state._metadata == model.state_dict()._metadata
    assert state._metadata["0"] == {"version": 2}


def test_extra_state_of_a_module_is_restored() -> None:
    class Counting(torch.nn.Module):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

    assert round_trip(Counting())["_extra_state"] == {"seen": 3}


def check_saved_without_prefix(wrapped: Any) -> None:
    bare = make_model().state_dict()
    loaded = round_trip({"model": wrapped})["model"]
    assert list(loaded) == list(bare)
    assert loaded._metadata == bare._metadata
    make_model().load_state_dict(loaded)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_data_parallel_models_are_saved_without_prefix() -> None:
    with group_of_one():
        wrapped = torch.nn.parallel.DistributedDataParallel(make_model())
        assert next(iter(wrapped.state_dict())).startswith("module.")
        check_saved_without_prefix(wrapped)
        check_saved_without_prefix(torch.nn.DataParallel(wrapped))


def test_compiled_models_are_saved_without_prefix() -> None:
    compiled = torch.compile(make_model())
    assert next(iter(compiled.state_dict())).startswith("_orig_mod.")
    check_saved_without_prefix(compiled)
    check_saved_without_prefix(torch.nn.DataParallel(compiled))
    check_saved_without_prefix(torch.compile(torch.nn.DataParallel(make_model())))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_models_load_what_was_saved_of_them(tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        compiled = torch.compile(make_model(), backend="eager")
        raysgd.save_checkpoint({"model": compiled})
        loaded = raysgd.load_checkpoint()["model"]
    for again in (torch.compile(make_model(), backend="eager"), torch.nn.Sequential(torch.compile(make_model()))):
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        is_part = isinstance(again, torch.nn.Sequential)
        again.load_state_dict({f"0.{name}": value for name, value in loaded.items()} if is_part else loaded)
        for ours, saved in zip(again.state_dict().values(), compiled.state_dict().values(), strict=True):
            assert torch.equal(ours, saved)
        again.load_state_dict(again.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        compiled.load_state_dict({**loaded, "more": torch.zeros(1)})


def test_layer_called_module_keeps_its_name() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    loaded = round_trip(Net())
    Net().load_state_dict(loaded)
    assert list(loaded) == ["module.weight", "module.bias"]


def test_raysgd_unwrap_is_saved_instead_of_state_dict() -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __raysgd_unwrap__(self) -> Any:
            return self.inner

        def state_dict(self) -> Any:
            raise AssertionError("the wrapped object is asked, not the wrapper")

    model = make_model()
    check_saved_without_prefix(Wrapper(Wrapper(model)))
    assert round_trip(Wrapper({"a": 1})) == {"a": 1}


def test_model_at_two_places_is_saved_once() -> None:
    model = make_model()
    loaded = round_trip({"a": model, "b": model})
    assert loaded["a"] is loaded["b"]


def test_saving_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_model()
        round_trip({"model": model, "optimizer": torch.optim.Adam(model.parameters())})
