"""Seeds per rank, determinism, torch's generator states, seeds of loader processes."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.session.rank_state import capture_generators, make_deterministic, restore_generators, seed_generators
from raysgd.torch.samplers import LoaderSeeds, seeded


def draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(2).tolist()


@pytest.fixture(autouse=True)
def _generators_are_put_back() -> Iterator[None]:
    with seeded(0):
        yield


@pytest.fixture
def _flags_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]


def test_numbers_repeat_for_the_same_seed_and_rank() -> None:
    seed_generators(7, 1)
    first = draw()
    seed_generators(7, 1)
    assert draw() == first


def test_ranks_draw_different_numbers_from_every_generator() -> None:
    draws = []
    for rank in (0, 1):
        seed_generators(7, rank)
        draws.append(draw())
    assert all(mine != other for mine, other in zip(*draws, strict=True))


def test_seeds_larger_than_32_bits_are_allowed() -> None:
    seed_generators(2**32 - 1, 3)
    first = draw()
    seed_generators(2**32 - 1, 3)
    assert draw() == first


@pytest.mark.usefixtures("_flags_are_put_back")
def test_deterministic_refuses_nondeterministic_operations() -> None:
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("_flags_are_put_back")
def test_deterministic_keeps_the_users_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_captured_generators_continue_after_json_round_trip() -> None:
    torch.rand(5)
    text = json.dumps(capture_generators())
    expected = torch.randn(3)
    torch.rand(100)
    restore_generators(json.loads(text))
    assert torch.equal(torch.randn(3), expected)
    assert len(text) < 30_000


def test_gpu_generator_state_is_ignored_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    restore_generators({"torch_cuda": "AAAA"})


def test_seeded_restores_all_generators() -> None:
    own = torch.Generator().manual_seed(3)
    state = own.get_state()
    seed_generators(1, 0)
    expected = draw()
    seed_generators(1, 0)
    with seeded(5, own):
        inside = draw(), torch.rand(1, generator=own).item()
    assert draw() == expected
    assert torch.equal(own.get_state(), state)
    with seeded(5, own):
        assert (draw(), torch.rand(1, generator=own).item()) == inside


def drawn_by(seed: int | None, rank: int, epoch: int, worker_id: int) -> tuple[Any, ...]:
    """Return what a loader's process draws, and the base of its seeds."""
    seeds = LoaderSeeds(seed, rank, None)
    seeds.set_epoch(epoch)
    base = torch.rand(1, generator=seeds.generator).item()
    pickle.loads(pickle.dumps(seeds))(worker_id)
    return (*draw(), base + worker_id)


def test_each_loader_process_draws_different_numbers() -> None:
    places = itertools.product((0, 1), repeat=3)
    for generator in zip(*(drawn_by(7, *place) for place in places), strict=True):
        assert len({str(numbers) for numbers in generator}) == 8


def test_numbers_of_loader_processes_repeat_with_the_seed() -> None:
    assert drawn_by(7, 1, 2, 1) == drawn_by(7, 1, 2, 1)


def test_loader_processes_differ_between_ranks_that_were_seeded_equally() -> None:
    draws = []
    for rank in (0, 1, 0):
        torch.manual_seed(5)
        draws.append(drawn_by(None, rank, 0, 0))
    assert draws[0] != draws[1]
    assert draws[0] == draws[2]


def test_users_worker_init_fn_is_called_last() -> None:
    seen: list[int] = []
    init = LoaderSeeds(7, 0, lambda worker_id: (seen.append(worker_id), random.seed(1)))
    init(3)
    assert seen == [3]
    assert random.random() == random.Random(1).random()
