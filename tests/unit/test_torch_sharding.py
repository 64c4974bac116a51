"""Samplers: the shares of all ranks together are the data, in an order that seed and epoch alone decide."""

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
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from raysgd.torch.sharding import Share


class Shuffled:
    """A user's sampler that draws from Python's generator."""

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


def shares(make: Any, num_ranks: int, *, epoch: int = 0, seed: int = 0, drop_last: bool = False) -> list[list[Any]]:
    """What each rank reads; each has a sampler of its own and draws of its own before it."""
    found = []
    for rank in range(num_ranks):
        torch.rand(rank + 1), random.random()  # ranks do not stand at the same place of their generators
        sampler = Share(rank, num_ranks, seed).of(make(), drop_last=drop_last)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


@pytest.mark.parametrize("kind", SAMPLERS)
@given(num=st.integers(1, 40), num_ranks=st.integers(1, 6), epoch=st.integers(0, 3))
def test_shares_are_equally_long_and_make_up_the_data(kind: str, num: int, num_ranks: int, epoch: int) -> None:
    each = shares(lambda: SAMPLERS[kind](num), num_ranks, epoch=epoch)
    assert {len(share) for share in each} == {math.ceil(num / num_ranks)}
    counts = Counter(itertools.chain.from_iterable(each))
    assert set(counts) == set(range(num))
    # The padding repeats items evenly; a sampler that had another order on each rank would leave some out.
    assert sum(counts.values()) - num < num_ranks


@pytest.mark.parametrize("kind", SAMPLERS)
@given(num=st.integers(1, 40), num_ranks=st.integers(1, 6))
def test_drop_last_repeats_nothing(kind: str, num: int, num_ranks: int) -> None:
    each = shares(lambda: SAMPLERS[kind](num), num_ranks, drop_last=True)
    items = list(itertools.chain.from_iterable(each))
    assert len(items) == len(set(items)) == num // num_ranks * num_ranks


@pytest.mark.parametrize("kind", ["sequential", "user's", "subset"])  # torch refuses to shuffle nothing
def test_no_data_gives_empty_shares(kind: str) -> None:
    assert shares(lambda: SAMPLERS[kind](0), 3) == [[], [], []]


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "sequential"])
def test_epochs_differ_and_repeat(kind: str) -> None:
    orders = [shares(lambda: SAMPLERS[kind](30), 2, epoch=epoch) for epoch in (0, 1, 0)]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "sequential"])
def test_seeds_differ(kind: str) -> None:
    assert shares(lambda: SAMPLERS[kind](30), 2, seed=1) != shares(lambda: SAMPLERS[kind](30), 2, seed=2)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_order_does_not_depend_on_the_number_of_ranks(kind: str) -> None:
    merged = [
        [item for step in zip(*shares(lambda: SAMPLERS[kind](24), num_ranks), strict=True) for item in step]
        for num_ranks in (1, 2, 3, 4)
    ]
    assert merged[0] == merged[1] == merged[2] == merged[3]


def test_torchs_own_order_is_kept_in_sequence() -> None:
    assert shares(lambda: SequentialSampler(range(6)), 2) == [[0, 2, 4], [1, 3, 5]]


def test_a_chosen_number_of_draws_stays_that_number() -> None:
    each = shares(lambda: RandomSampler(range(10), replacement=True, num_samples=100), 4)
    assert [len(share) for share in each] == [25] * 4
    assert max(Counter(itertools.chain.from_iterable(each)).values()) > 1


def test_weighted_draws_are_the_same_on_all_ranks() -> None:
    each = shares(lambda: WeightedRandomSampler([0.0, 1.0, 1.0, 0.0], 1000, replacement=True), 2)
    alone = shares(lambda: WeightedRandomSampler([0.0, 1.0, 1.0, 0.0], 1000, replacement=True), 1)
    assert [item for step in zip(*each, strict=True) for item in step] == alone[0]
    assert set(alone[0]) == {1, 2}


def test_a_users_batch_sampler_is_shared_batch_by_batch() -> None:
    class Buckets(BatchSampler):
        pass

    each = shares(lambda: Buckets(SequentialSampler(range(7)), 2, False), 2)
    assert each == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_a_share_is_not_shared_again() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=0)
    batches = BatchSampler(sampler, 2, False)
    share = Share(0, 2, 0)
    assert share.of(sampler, drop_last=False) is sampler
    assert share.of(batches, drop_last=False) is batches


def test_a_sampler_without_a_length_is_read_as_it_goes() -> None:
    sampler = Share(1, 3, 0).of(Endless(), drop_last=False)
    assert list(itertools.islice(sampler, 4)) == [1, 4, 7, 10]
    with pytest.raises(TypeError):
        len(sampler)


def test_a_sampler_without_a_length_ends_with_the_last_complete_round() -> None:
    class Seven:
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    each = [list(Share(rank, 3, 0).of(Seven(), drop_last=False)) for rank in range(3)]
    assert each == [[0, 3], [1, 4], [2, 5]]


def test_reading_an_order_does_not_disturb_the_generators() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    list(Share(0, 2, 0).of(Shuffled(10), drop_last=False))
    assert torch.equal(torch.rand(3), expected)


def test_the_epoch_reaches_the_users_sampler() -> None:
    class Epochs(Shuffled):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inner = Epochs(4)
    Share(0, 2, 0).of(inner, drop_last=False).set_epoch(3)
    assert inner.epoch == 3
