"""Samplers: the shards of all ranks cover the data, in an order that depends only on seed and epoch."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from raysgd.torch.samplers import Order, RankSampler, Shard


class Shuffled:
    """A custom sampler that draws from Python's generator."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num))
        random.shuffle(order)
        return iter(order)


class Endless:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


SAMPLERS = {
    "sequential": lambda num: SequentialSampler(range(num)),
    "shuffling": lambda num: RandomSampler(range(num)),
    "subset": lambda num: SubsetRandomSampler(range(num)),
    "own generator": lambda num: SubsetRandomSampler(range(num), generator=torch.Generator()),
    "user's": Shuffled,
}


def rank_sampler(sampler: Any, rank: int, num_ranks: int, *, seed: int = 0, drop_last: bool = False) -> RankSampler:
    return RankSampler(Order(sampler, seed), Shard(rank, num_ranks, seed), train=True, drop_last=drop_last)


def shards(make: Any, num_ranks: int, *, epoch: int = 0, seed: int = 0, drop_last: bool = False) -> list[list[Any]]:
    """Return what each rank reads, from a sampler of its own and with different states of the generators."""
    found = []
    for rank in range(num_ranks):
        torch.rand(rank + 1), random.random()  # the generators of ranks have different states
        sampler = rank_sampler(make(), rank, num_ranks, seed=seed, drop_last=drop_last)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


@pytest.mark.parametrize("kind", SAMPLERS)
@given(num=st.integers(1, 40), num_ranks=st.integers(1, 6), epoch=st.integers(0, 3))
def test_shards_have_equal_lengths_and_cover_the_data(kind: str, num: int, num_ranks: int, epoch: int) -> None:
    each = shards(lambda: SAMPLERS[kind](num), num_ranks, epoch=epoch)
    assert {len(shard) for shard in each} == {math.ceil(num / num_ranks)}
    counts = Counter(itertools.chain.from_iterable(each))
    assert set(counts) == set(range(num))
    # Padding repeats items evenly; if ranks had different orders, items would be missing.
    assert sum(counts.values()) - num < num_ranks


@pytest.mark.parametrize("kind", SAMPLERS)
@given(num=st.integers(1, 40), num_ranks=st.integers(1, 6))
def test_drop_last_repeats_no_item(kind: str, num: int, num_ranks: int) -> None:
    each = shards(lambda: SAMPLERS[kind](num), num_ranks, drop_last=True)
    items = list(itertools.chain.from_iterable(each))
    assert len(items) == len(set(items)) == num // num_ranks * num_ranks


@pytest.mark.parametrize("kind", ["sequential", "user's", "subset"])  # torch refuses to shuffle nothing
def test_no_data_gives_empty_shards(kind: str) -> None:
    assert shards(lambda: SAMPLERS[kind](0), 3) == [[], [], []]


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "sequential"])
def test_epochs_have_different_and_repeatable_orders(kind: str) -> None:
    orders = [shards(lambda: SAMPLERS[kind](30), 2, epoch=epoch) for epoch in (0, 1, 0)]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "sequential"])
def test_seeds_give_different_orders(kind: str) -> None:
    assert shards(lambda: SAMPLERS[kind](30), 2, seed=1) != shards(lambda: SAMPLERS[kind](30), 2, seed=2)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_order_does_not_depend_on_number_of_ranks(kind: str) -> None:
    merged = [
        [item for step in zip(*shards(lambda: SAMPLERS[kind](24), num_ranks), strict=True) for item in step]
        for num_ranks in (1, 2, 3, 4)
    ]
    assert merged[0] == merged[1] == merged[2] == merged[3]


def test_sequential_order_is_kept() -> None:
    assert shards(lambda: SequentialSampler(range(6)), 2) == [[0, 2, 4], [1, 3, 5]]


def test_number_of_samples_with_replacement_is_kept() -> None:
    each = shards(lambda: RandomSampler(range(10), replacement=True, num_samples=100), 4)
    assert [len(shard) for shard in each] == [25] * 4
    assert max(Counter(itertools.chain.from_iterable(each)).values()) > 1


def test_weighted_samples_are_equal_on_all_ranks() -> None:
    each = shards(lambda: WeightedRandomSampler([0.0, 1.0, 1.0, 0.0], 1000, replacement=True), 2)
    alone = shards(lambda: WeightedRandomSampler([0.0, 1.0, 1.0, 0.0], 1000, replacement=True), 1)
    assert [item for step in zip(*each, strict=True) for item in step] == alone[0]
    assert set(alone[0]) == {1, 2}


def test_custom_batch_sampler_is_split_by_batches() -> None:
    class Buckets(BatchSampler):
        pass

    each = shards(lambda: Buckets(SequentialSampler(range(7)), 2, False), 2)
    assert each == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_sampler_without_length_is_read_on_demand() -> None:
    sampler = rank_sampler(Endless(), 1, 3)
    assert list(itertools.islice(sampler, 4)) == [1, 4, 7, 10]
    with pytest.raises(TypeError):
        len(sampler)


def test_sampler_without_length_is_filled_up_like_any_other() -> None:
    class Seven:
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    assert [list(rank_sampler(Seven(), rank, 3)) for rank in range(3)] == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert [list(rank_sampler(Seven(), rank, 3, drop_last=True)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_drawing_an_order_restores_the_generators() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    list(rank_sampler(Shuffled(10), 0, 2))
    assert torch.equal(torch.rand(3), expected)


def test_set_epoch_reaches_custom_sampler() -> None:
    class Epochs(Shuffled):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inner = Epochs(4)
    rank_sampler(BatchSampler(inner, 2, False), 0, 2).set_epoch(3)
    assert inner.epoch == 3
