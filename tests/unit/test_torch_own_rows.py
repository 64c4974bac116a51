"""Which rows each rank reads in each batch, and which of them are its own, for every kind of loader and sampler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

import raysgd
from raysgd.torch import PreparedLoader, prepare_data_loader
from raysgd.torch.evaluation import EvaluationLoader, interleave
from raysgd.torch.rows import FollowedLoader, skip_batches
from support.loader_draws import Enter, on_ranks, worlds


class Epochs(Sampler[int]):
    """A sampler of the user, whose order depends on the epoch that it gets."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.order = random.Random(epoch).sample(range(self.num), self.num)

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class WithoutLength:
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))


class Estimated(BatchSampler):
    """A batch sampler whose length is a guess, as with batches of so many tokens."""

    def __len__(self) -> int:
        return super().__len__() + 2


def as_shards(sampler: Any, size: int, drop_last: bool) -> Any:
    return {"batch_size": size, "sampler": sampler, "drop_last": drop_last}


KINDS: dict[str, Any] = {
    "sequential": lambda num, size, drop: {"batch_size": size, "drop_last": drop},
    "shuffled": lambda num, size, drop: {"batch_size": size, "drop_last": drop, "shuffle": True},
    "subset": lambda num, size, drop: as_shards(SubsetRandomSampler(range(num)), size, drop),
    "sampler with epochs": lambda num, size, drop: as_shards(Epochs(num), size, drop),
    "without a length": lambda num, size, drop: as_shards(WithoutLength(num), size, drop),
    "batch sampler": lambda num, size, drop: {"batch_sampler": BatchSampler(RandomSampler(range(num)), size, drop)},
    "user's batch sampler": lambda num, size, drop: {
        "batch_sampler": type("Own", (BatchSampler,), {})(Epochs(num), size, False)
    },
    "estimated length": lambda num, size, drop: {
        "batch_sampler": Estimated(SequentialSampler(range(num)), size, False)
    },
    "batches as items": lambda num, size, drop: {
        "sampler": BatchSampler(Epochs(num), size, False),
        "batch_size": None,
        "collate_fn": torch.as_tensor,
    },
}


class Numbers(torch.utils.data.Dataset[Any]):
    """Rows that are numbers; a list of them for a list of indices."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        return index


@pytest.fixture
def world() -> Iterator[Enter]:
    with worlds() as enter:
        yield enter


def read(loader: PreparedLoader, *, skips: int = 0) -> list[list[int]]:
    """Return the rows of each batch that count on this rank."""
    return [batch[: loader.rows.own].tolist() for batch in skip_batches(loader, skips)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(1, 30),
    size=st.integers(1, 6),
    num_ranks=st.integers(1, 5),
    more=st.none() | st.integers(0, 6),
    epoch=st.integers(0, 2),
    drop_last=st.booleans(),
    train=st.booleans(),
)
def test_each_row_counts_on_one_rank_in_the_order_of_one_rank(
    kind: str, num: int, size: int, num_ranks: int, more: int | None, epoch: int, drop_last: bool, train: bool
) -> None:
    makes_batches = "batch_sampler" not in KINDS[kind](num, size, False) and kind != "batches as items"
    globally = {} if more is None or not makes_batches else {"global_batch_size": num_ranks + more}

    def own(rank: int, **more: Any) -> list[list[int]]:
        loader = DataLoader(Numbers(num), **KINDS[kind](num, size, drop_last))
        prepared = prepare_data_loader(loader, train=train, **more)
        prepared.set_epoch(epoch)
        batches = read(prepared)
        if kind not in ("without a length", "estimated length"):
            assert len(prepared) == len(batches)
        prepared.set_epoch(epoch)
        assert read(prepared, skips=len(batches) // 2) == batches[len(batches) // 2 :]
        return batches

    with worlds() as world:
        ranks = on_ranks(world, num_ranks, lambda rank: own(rank, **globally))
        (alone,) = on_ranks(world, 1, lambda rank: own(rank, **({"global_batch_size": num} if makes_batches else {})))
    assert len({len(batches) for batches in ranks}) == 1
    steps = list(zip(*ranks, strict=True))
    together = [
        row
        for step in steps
        for row in (interleave(step) if makes_batches or kind == "batch sampler" else chain(*step))
    ]
    whole = list(chain(*alone))
    dropped = len(whole) - len(together)
    assert together == whole[: len(together)]
    if drop_last and (makes_batches or kind == "batch sampler"):
        assert dropped < globally.get("global_batch_size", size * num_ranks)
    else:
        assert dropped == 0


@pytest.mark.parametrize("makes_batches", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 30),
    size=st.integers(1, 5),
    num_ranks=st.integers(2, 4),
    drops=st.booleans(),
    drop_last=st.booleans(),
    train=st.booleans(),
    add_sampler=st.booleans(),
)
def test_rows_of_torch_distributed_sampler_count_once(
    makes_batches: bool,
    num: int,
    size: int,
    num_ranks: int,
    drops: bool,
    drop_last: bool,
    train: bool,
    add_sampler: bool,
) -> None:
    """Also where the loader takes it as it is, and in an evaluation."""
    batching: dict[str, Any] = {"batch_size": size, "drop_last": drop_last} if makes_batches else {"batch_size": None}

    def batches(rank: int) -> tuple[Any, Any, Any]:
        sampler: Any = DistributedSampler(Numbers(num), num_ranks, rank, seed=7, drop_last=drops)
        loader = DataLoader(Numbers(num), sampler=sampler, **batching)
        prepared = prepare_data_loader(loader, train=train, add_sampler=add_sampler)
        got = [torch.as_tensor(batch).reshape(-1).tolist() for batch in prepared]
        prepared.set_epoch(0)
        counted = [torch.as_tensor(batch).reshape(-1).tolist()[: prepared.rows.own] for batch in prepared]
        given = [torch.as_tensor(batch).reshape(-1).tolist() for batch in loader]
        return got, counted, given

    with worlds() as world:
        ranks = on_ranks(world, num_ranks, batches)
    counted = [row for _, rows, _ in ranks for row in chain(*rows)]
    assert len(counted) == len(set(counted))
    if train:
        assert all(got == given for got, _, given in ranks), "training reads what the sampler yields"
    if not (drops or (drop_last and makes_batches)):
        assert sorted(counted) == list(range(num))


# -- epochs and positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shuffled", "subset", "batch sampler", "user's batch sampler", "torch's"])
def test_epoch_that_a_loop_sets_on_the_sampler_counts(world: Enter, kind: str) -> None:
    """A loop of torchrun's sets the epoch on the sampler; one that is resumed begins with a later one."""
    world(1, 2, seed=3)

    def make() -> Any:
        if kind == "torch's":
            sampler: Any = DistributedSampler(Numbers(20), 2, 1)
            return prepare_data_loader(DataLoader(Numbers(20), batch_size=2, sampler=sampler))
        return prepare_data_loader(DataLoader(Numbers(20), **KINDS[kind](20, 2, False)))

    whole = make()
    epochs = [read(whole) for _ in range(5)]
    assert all(one != other for one, other in pairwise(epochs))
    resumed = make()
    for epoch in (3, 4, 1):
        sampler = resumed.batch_sampler if kind.endswith("batch sampler") else resumed.sampler
        sampler.set_epoch(epoch)
        assert read(resumed) == epochs[epoch] and resumed.epoch == epoch
    assert read(resumed) == epochs[2], "without it, the next epoch follows"
    resumed.set_epoch(4)
    assert read(resumed) == epochs[4]


def test_loaders_of_one_sampler_count_their_epochs_apart(world: Enter) -> None:
    world(0, 2)
    sampler: Any = DistributedSampler(Numbers(20), 2, 0)
    one, other = (prepare_data_loader(DataLoader(Numbers(20), sampler=sampler)) for _ in range(2))
    first = [read(one) for _ in range(3)]
    assert [read(other), read(one)] == [first[0], read_epoch(3)]
    assert read(other) == first[1]


def read_epoch(epoch: int) -> list[list[int]]:
    sampler: Any = DistributedSampler(Numbers(20), 2, 0)
    sampler.set_epoch(epoch)
    return [[row] for row in sampler]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_batches_of_a_stream_that_are_left_out_are_not_handed_out(world: Enter) -> None:
    world()
    handed: list[bool] = []
    prepared = prepare_data_loader(DataLoader(Stream(), batch_size=2))
    loader = FollowedLoader(prepared, lambda batch: handed.append(batch.is_last), keeps_repeated=True)
    assert [batch.tolist() for batch in skip_batches(loader, 2)] == [[4, 5], [6, 7]]
    assert handed == [False, True]


def test_last_batch_of_a_sampler_without_length_is_known(world: Enter) -> None:
    world(1, 2)
    handed: list[tuple[int, bool]] = []
    prepared = prepare_data_loader(DataLoader(Numbers(5), **as_shards(WithoutLength(5), 2, False)))
    loader = FollowedLoader(
        prepared, lambda batch: handed.append((batch.num_rows, batch.is_last)), keeps_repeated=False
    )
    assert [batch.tolist() for batch in loader] == [[1, 3], [0]]
    assert handed == [(2, False), (0, True)]


def test_two_loops_over_one_loader_know_their_own_rows(world: Enter) -> None:
    world(1, 2)
    prepared = prepare_data_loader(DataLoader(Numbers(5), batch_size=2))
    outer = []
    for batch in prepared:
        outer.append(prepared.rows.own)
        assert len(batch) == [2, 1][len(outer) - 1]
        next(iter(prepared))
    assert outer == [2, 0]


# -- values for metrics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["user's batch sampler", "batches as items", "uneven", "two entries for an item"])
@pytest.mark.parametrize("train", [True, False])
@settings(max_examples=15, deadline=None)
@given(num=st.integers(1, 20), size=st.integers(1, 4), num_ranks=st.integers(2, 4))
def test_values_of_every_row_are_gathered_once_in_the_order_of_the_data(
    kind: str, train: bool, num: int, size: int, num_ranks: int
) -> None:
    def gather(rank: int) -> tuple[list[int], list[int]]:
        engine = object.__new__(raysgd.Engine)
        given: dict[str, Any] = {"batch_size": size}
        if kind in KINDS:
            given = KINDS[kind](num, size, False)
        elif kind != "uneven":
            given["collate_fn"] = lambda rows: torch.tensor([number for row in rows for number in (row, row + 100)])
        globally: dict[str, Any] = {"global_batch_size": num_ranks + size} if kind == "uneven" else {}
        prepared = prepare_data_loader(DataLoader(Numbers(num), **given), train=train, **globally)
        newest = [number for batch in prepared for number in engine.gather_for_metrics(batch).tolist()]
        loader = EvaluationLoader(prepared)
        loader.set_epoch(0)
        seen = torch.cat(list(loader))
        return newest, loader.gather(seen).tolist()

    order = list(Epochs(num)) if kind in KINDS else list(range(num))
    if kind == "two entries for an item":
        order = [number for row in order for number in (row, row + 100)]
    with worlds() as world:
        assert on_ranks(world, num_ranks, gather) == [(order, order)] * num_ranks
