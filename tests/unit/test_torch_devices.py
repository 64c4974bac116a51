"""`raysgd.torch.device`: which GPU a worker takes. CUDA itself is pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import raysgd.torch
from raysgd.errors import ConfigError
from raysgd.session import context

Machine = Callable[..., None]


@pytest.fixture(autouse=True)
def _no_session_is_left() -> Iterator[None]:
    yield
    context.uninstall()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend a number of visible GPUs, and a worker that was given one of them."""

    def pretend(gpus: int, index: str | None = None, in_worker: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        if index is not None:
            monkeypatch.setenv("RAYSGD_DEVICE_INDEX", index)
        context.install(cast(Any, SimpleNamespace(in_worker=in_worker)))

    return pretend


def test_a_worker_takes_its_own_of_several_visible_gpus(machine: Machine) -> None:
    machine(4, index="2")
    assert raysgd.torch.device() == torch.device("cuda:2")


def test_without_an_index_the_only_visible_gpu_is_taken(machine: Machine) -> None:
    machine(1)
    assert raysgd.torch.device() == torch.device("cuda:0")


def test_without_an_index_no_gpu_of_several_is_taken(machine: Machine) -> None:
    machine(2)
    assert raysgd.torch.device() == torch.device("cpu")


def test_a_machine_without_gpus_gives_the_cpu(machine: Machine) -> None:
    machine(0, index="0")
    assert raysgd.torch.device() == torch.device("cpu")


def test_outside_a_worker_a_gpu_is_taken_where_there_is_one(machine: Machine) -> None:
    machine(2, index="1", in_worker=False)
    assert raysgd.torch.device() == torch.device("cuda:0")


@pytest.mark.parametrize("index", ["2", "-1", "first"])
def test_an_index_that_is_not_visible_names_itself_and_what_is_allowed(machine: Machine, index: str) -> None:
    machine(2, index=index)
    with pytest.raises(ConfigError, match=rf"RAYSGD_DEVICE_INDEX='{index}'.*from 0 to 1"):
        raysgd.torch.device()
