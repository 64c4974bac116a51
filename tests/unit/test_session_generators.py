"""The random number generators of a worker are seeded per rank, saved as JSON and restored."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.session.rank_state import (
    capture_generators,
    make_deterministic,
    restore_generators,
    seed_generators,
    use_one_thread,
)

DRAWS: dict[str, Callable[[], Any]] = {
    "python": lambda: [random.random(), random.gauss(0, 1), random.randrange(10**6)],
    "numpy": lambda: [np.random.random(), np.random.normal(), int(np.random.randint(10**6))],
    "torch": lambda: torch.rand(3).tolist(),
}


def draw() -> dict[str, Any]:
    return {name: sample() for name, sample in DRAWS.items()}


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    """The other tests' generators stay as they are."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def through_json(states: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint's manifest carries them."""
    text = json.dumps(states, allow_nan=False)
    assert json.loads(text) == states  # plain JSON: nothing changes on the way
    restored: dict[str, Any] = json.loads(text)
    return restored


def test_restored_generators_continue_where_they_were_saved() -> None:
    seed_generators(1, 0)
    draw()
    states = through_json(capture_generators())
    expected = [draw() for _ in range(3)]
    seed_generators(2, 0)
    restore_generators(states)
    assert [draw() for _ in range(3)] == expected


def test_saving_does_not_advance_generators() -> None:
    seed_generators(1, 0)
    capture_generators()
    first = draw()
    seed_generators(1, 0)
    assert draw() == first


def test_second_value_of_a_pair_of_normals_is_saved() -> None:
    random.gauss(0, 1)  # makes two, keeps one
    np.random.normal()
    states = through_json(capture_generators())
    expected = draw()
    restore_generators(states)
    assert draw() == expected


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_seed_gives_each_rank_its_own_repeatable_numbers(name: str) -> None:
    def drawn(seed: int, rank: int) -> Any:
        seed_generators(seed, rank)
        return DRAWS[name]()

    ranks = [drawn(7, rank) for rank in range(4)]
    assert ranks == [drawn(7, rank) for rank in range(4)]
    assert len({str(values) for values in ranks}) == 4
    assert drawn(8, 0) == ranks[1]


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63])
def test_any_seed_is_accepted(seed: int) -> None:
    seed_generators(seed, 3)
    first = draw()
    seed_generators(seed, 3)
    assert draw() == first


def test_framework_that_is_not_loaded_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_generators(1, 0)
    everything = capture_generators()
    assert {"python", "numpy", "torch"} <= set(everything)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "numpy")
    assert set(capture_generators()) == {"python"}
    seed_generators(2, 0)
    expected = random.random()
    seed_generators(3, 0)
    restore_generators(everything)  # saved where there was more
    assert random.random() != expected


def test_generator_without_a_saved_state_is_unchanged() -> None:
    seed_generators(1, 0)
    expected = DRAWS["torch"]()
    seed_generators(1, 0)
    restore_generators({"python": capture_generators()["python"]})
    restore_generators({})
    assert DRAWS["torch"]() == expected


def test_deterministic_training_has_deterministic_kernels_and_adds_in_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is removed at the end
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_deterministic()
        use_one_thread()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.get_num_threads() == 1
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(num_threads)
