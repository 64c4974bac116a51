"""Logical workers add in one order and draw the same random numbers, however many processes act as them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import UsageError
from raysgd.session import generators, rank_state
from raysgd.session.logical import LogicalWorkers, Node, TreeSum, border_nodes, workers_of_rank

SIZES = st.integers(1, 70)


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    """The other tests' generators stay as they are."""
    states = generators.read()
    yield
    generators.write(states)


def add_up(values: list[np.float32], world_size: int) -> np.float32:
    """Add as ``world_size`` processes do: each its own leaves, then what is left of all of them."""
    tree = TreeSum[np.float32](len(values), np.add)
    sent = []
    for rank in range(world_size):
        for leaf in workers_of_rank(rank, world_size, len(values)):
            tree.put(Node(0, leaf), values[leaf])
        sent += tree.take()
    for node, value in sent:
        tree.put(node, value)
    return tree.take_root()


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=40))
def test_the_sum_has_the_same_bits_for_every_number_of_processes(numbers: list[float]) -> None:
    values = [np.float32(number) for number in numbers]
    sums = {add_up(values, world_size).tobytes() for world_size in range(1, len(values) + 1)}
    assert len(sums) == 1
    bound = 1e-5 * sum(abs(float(value)) for value in values)  # far above what pairwise summation loses
    assert abs(float(add_up(values, 1)) - sum(map(float, values))) <= bound


def test_neighbours_are_added_in_pairs_and_the_odd_one_moves_up() -> None:
    tree = TreeSum[str](7, lambda left, right: f"({left}{right})")
    for leaf in range(7):
        tree.put(Node(0, leaf), str(leaf))
    assert tree.take_root() == "(((01)(23))((45)6))"


@given(SIZES, st.integers(1, 70))
def test_ranks_send_few_nodes_which_cover_all_leaves_once(num_leaves: int, world_size: int) -> None:
    world_size = min(world_size, num_leaves)
    ranges = [workers_of_rank(rank, world_size, num_leaves) for rank in range(world_size)]
    assert list(chain.from_iterable(ranges)) == list(range(num_leaves))
    for own in ranges:
        nodes = border_nodes(own, num_leaves)
        covered = [range(n << level, min((n + 1) << level, num_leaves)) for level, n in nodes]
        assert list(chain.from_iterable(covered)) == list(own)
        assert len(nodes) <= max(1, 2 * num_leaves.bit_length() - 2)
    if num_leaves & (num_leaves - 1) == 0 and num_leaves % world_size == 0 and world_size & (world_size - 1) == 0:
        assert all(len(border_nodes(own, num_leaves)) == 1 for own in ranges)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(1))


def draws_of_steps(world_size: int, steps: range, states: dict[str, object] | None = None) -> dict[int, list[object]]:
    """Return what each logical worker of six drew in these steps, and under -1 what was drawn between them."""
    drawn: dict[int, list[object]] = {}
    for rank in range(world_size):
        generators.seed(3)
        workers = LogicalWorkers(6, rank, world_size, 3)
        workers.restore(states or {})
        for _ in steps:
            for number in workers.own:
                with workers.acting_as(number):
                    drawn.setdefault(number, []).append(draw())
            drawn.setdefault(-1, []).append((rank, draw()))
        if states is not None:
            states.update(workers.to_json())
    return drawn


@pytest.mark.parametrize("world_size", [2, 4, 6])
def test_each_draws_the_same_numbers_in_any_number_of_processes(world_size: int) -> None:
    alone, shared = draws_of_steps(1, range(3)), draws_of_steps(world_size, range(3))
    assert all(alone[number] == shared[number] for number in range(6))
    assert len({tuple(alone[number]) for number in range(6)}) == 6, "two of them drew the same"
    between = [value for _, value in alone[-1]]
    assert shared[-1] == [(rank, value) for rank in range(world_size) for value in between], "ranks drew differently"


def test_draws_continue_from_a_checkpoint_with_another_number_of_processes() -> None:
    whole = draws_of_steps(1, range(5))
    states: dict[str, object] = {}
    draws_of_steps(4, range(2), states)
    later = draws_of_steps(3, range(3), dict(states))
    assert all(later[number] == whole[number][2:] for number in range(6))


def test_what_each_rank_reports_is_refused_inside_a_step() -> None:
    workers = LogicalWorkers(2, 0, 1, None)
    workers.check_outside("report()")
    with workers.acting_as(1):
        with pytest.raises(UsageError, match=r"save_checkpoint\(\) inside the loop"):
            workers.check_outside("save_checkpoint()")
        with pytest.raises(UsageError, match="inside another one"), workers.acting_as(0):
            pass
    assert workers.acting is None


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranks_inherit_the_same_from_the_shared_states_as_from_all(num_ranks: int) -> None:
    states: dict[int, dict[str, object]] = {}
    for rank in range(3):
        workers = LogicalWorkers(6, rank, 3, 3)
        for number in workers.own:
            with workers.acting_as(number):
                draw()
        states[rank] = {"generators": {"python": "of the run"}, "logical_generators": workers.to_json()}
    for rank in range(num_ranks):
        expected = rank_state.inherit(states, rank, is_same_size=num_ranks == 3)
        assert len(expected["logical_generators"]) == 6
        shared = rank_state.shared_states(states)
        if rank in states:
            shared[rank] = {**states[rank], **shared.get(rank, {})}
        assert rank_state.inherit(shared, rank, is_same_size=num_ranks == 3) == expected
