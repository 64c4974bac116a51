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

from raysgd.session.generators import (
    capture_generators,
    make_deterministic,
    restore_generators,
    seed_generators,
)
from raysgd.torch.seeding import LoaderSeeds, drawing_from


def draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(2).tolist()


@pytest.fixture(autouse=True)
def _generators_are_put_back() -> Iterator[None]:
    with drawing_from(0):
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


def test_a_seed_and_a_rank_give_the_same_numbers_again() -> None:
    seed_generators(7, 1)
    first = draw()
    seed_generators(7, 1)
    assert draw() == first


def test_ranks_draw_other_numbers_of_every_generator() -> None:
    draws = []
    for rank in (0, 1):
        seed_generators(7, rank)
        draws.append(draw())
    assert all(mine != other for mine, other in zip(*draws, strict=True))


def test_seeds_beyond_what_numpy_takes_are_allowed() -> None:
    seed_generators(2**32 - 1, 3)
    first = draw()
    seed_generators(2**32 - 1, 3)
    assert draw() == first


@pytest.mark.usefixtures("_flags_are_put_back")
def test_deterministic_refuses_what_cannot_repeat() -> None:
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("_flags_are_put_back")
def test_deterministic_keeps_the_workspace_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_captured_generators_go_on_where_they_were_after_a_trip_through_json() -> None:
    torch.rand(5)
    text = json.dumps(capture_generators())
    expected = torch.randn(3)
    torch.rand(100)
    restore_generators(json.loads(text))
    assert torch.equal(torch.randn(3), expected)
    assert len(text) < 30_000


def test_the_state_of_a_gpu_is_passed_over_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    restore_generators({"torch_cuda": "AAAA"})


def test_drawing_from_a_seed_leaves_no_trace() -> None:
    own = torch.Generator().manual_seed(3)
    state = own.get_state()
    seed_generators(1, 0)
    expected = draw()
    seed_generators(1, 0)
    with drawing_from(5, own):
        inside = draw(), torch.rand(1, generator=own).item()
    assert draw() == expected
    assert torch.equal(own.get_state(), state)
    with drawing_from(5, own):
        assert (draw(), torch.rand(1, generator=own).item()) == inside


def drawn_by(seed: int | None, rank: int, epoch: int, worker_id: int) -> tuple[Any, ...]:
    """What a loader's process draws, the loader's own base for the seeds of its processes included."""
    seeds = LoaderSeeds(seed, rank, None)
    seeds.set_epoch(epoch)
    base = torch.rand(1, generator=seeds.generator).item()
    pickle.loads(pickle.dumps(seeds))(worker_id)
    return (*draw(), base + worker_id)


def test_each_loader_process_draws_its_own_numbers() -> None:
    places = itertools.product((0, 1), repeat=3)
    for generator in zip(*(drawn_by(7, *place) for place in places), strict=True):
        assert len({str(numbers) for numbers in generator}) == 8


def test_loader_processes_repeat_with_the_seed() -> None:
    assert drawn_by(7, 1, 2, 1) == drawn_by(7, 1, 2, 1)


def test_without_a_seed_loader_processes_of_ranks_that_seeded_alike_still_differ() -> None:
    draws = []
    for rank in (0, 1, 0):
        torch.manual_seed(5)
        draws.append(drawn_by(None, rank, 0, 0))
    assert draws[0] != draws[1]
    assert draws[0] == draws[2]


def test_the_users_own_function_is_called_last() -> None:
    seen: list[int] = []
    init = LoaderSeeds(7, 0, lambda worker_id: (seen.append(worker_id), random.seed(1)))
    init(3)
    assert seen == [3]
    assert random.random() == random.Random(1).random()
