"""Rows of the dataset are counted, whatever a collate function makes of them; a loader that reads all rows is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from raysgd.session import context
from raysgd.torch import prepare_data_loader
from raysgd.torch.batches import are_same_batches, digest, take_rows
from raysgd.torch.loader import reads_shard
from support.loader_draws import Enter, on_ranks, worlds

LENGTH = 7
#: What collate functions make of rows of so many tokens.
LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows first": lambda rows: {"ids": rows, "mask": rows > 0},
    "tokens first": lambda rows: {"ids": rows.T.contiguous(), "length": LENGTH},
    "inputs and targets in one tensor": lambda rows: torch.stack([rows, rows + 1]),
    "tokens alone": lambda rows: {"ids": rows.reshape(-1)},
}


class Rows(Dataset[Any]):
    def __init__(self, num: int, draws: bool = False, offset: int = 0) -> None:
        self.num, self.draws, self.offset = num, draws, offset

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, place: int) -> torch.Tensor:
        added = random.random() if self.draws else 0
        return torch.arange(LENGTH) + LENGTH * (place + self.offset) + added


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(8))


@pytest.fixture
def world() -> Iterator[Enter]:
    with worlds() as enter:
        yield enter


def test_what_all_rows_share_is_not_cut_though_its_second_dimension_has_as_many() -> None:
    batch = {"x": torch.zeros(4, 5), "weights": torch.ones(3, 4)}
    assert {name: tuple(each.shape) for name, each in take_rows(batch, 2, 4).items()} == {
        "x": (2, 5),
        "weights": (3, 4),
    }


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    num=st.integers(1, 25),
    size=st.integers(3, 6),
    num_ranks=st.integers(1, 3),
    is_split=st.booleans(),
    train=st.booleans(),
)
def test_each_row_of_the_dataset_counts_once_in_every_layout_of_a_batch(
    layout: str, num: int, size: int, num_ranks: int, is_split: bool, train: bool
) -> None:
    make = LAYOUTS[layout]
    assume(train or is_split)

    def read(rank: int) -> list[tuple[int, int, Any]]:
        data = Rows(num)
        sampler = None if is_split else DistributedSampler(data, num_ranks, rank, shuffle=False)
        loader = DataLoader(data, size, sampler=sampler, collate_fn=lambda rows: make(torch.stack(rows)))
        prepared = prepare_data_loader(loader, add_sampler=is_split, train=train)
        found = []
        for batch in prepared:
            rows = prepared.rows
            own = take_rows(batch, rows.own, rows.num) if rows.own else None
            found.append((rows.samples, rows.own_samples, own))
        return found

    with worlds() as world:
        of_ranks = on_ranks(world, num_ranks, read)
    batches = [each for found in of_ranks for each in found]
    assert sum(own for _, own, _ in batches) == num
    assert all(0 <= own <= samples <= size for samples, own, _ in batches)
    for samples, own, batch in batches:
        if own and samples > 2:  # a batch of two rows may have them in either of two dimensions of two
            ids = batch if isinstance(batch, torch.Tensor) else batch["ids"]
            tokens = {"rows first": own, "tokens alone": own}.get(layout, own) * LENGTH
            assert ids.numel() == tokens * (2 if isinstance(batch, torch.Tensor) else 1)


def test_a_loader_that_reads_all_rows_of_one_dataset_is_noticed(world: Enter) -> None:
    def is_shard(make: Callable[[Any, Any], Any], data: Callable[[int], Any] = lambda _: Rows(8)) -> bool:
        def ask(rank: int) -> bool:
            dataset = data(rank)
            given = DistributedSampler(dataset, 2, rank) if hasattr(dataset, "__len__") else None
            return reads_shard(make(dataset, given), given)

        found = on_ranks(world, 2, ask)
        assert found[0] == found[1]
        return found[0]

    def own_sampler(data: Any, _: Any) -> Any:
        return DataLoader(data, 2, sampler=DistributedSampler(data, 2, context.current().identity.world_rank))

    def forgets(data: Any, _: Any) -> Any:
        return DataLoader(data, 2, shuffle=True)

    assert is_shard(lambda data, sampler: DataLoader(data, 2, sampler=sampler))
    assert is_shard(own_sampler)
    assert is_shard(lambda data, _: DataLoader(data, 2), lambda _: Stream())
    assert is_shard(forgets, lambda rank: Rows(8, offset=8 * rank))
    assert is_shard(forgets, lambda rank: Subset(Rows(8), range(rank, 8, 2)))
    assert not is_shard(forgets)
    assert not is_shard(forgets, lambda _: Rows(8, draws=True))
    assert not is_shard(lambda data, _: DataLoader(data, 2))


@given(rows=st.lists(st.integers(0, 3), min_size=8, max_size=20), num_ranks=st.integers(2, 4), size=st.integers(1, 2))
def test_ranks_that_read_all_rows_are_noticed_unless_all_rows_are_equal(
    rows: list[int], num_ranks: int, size: int
) -> None:
    def first_two(of_rank: list[int]) -> list[bytes]:
        batches = [torch.tensor(of_rank[start : start + size]) for start in range(0, len(of_rank), size)]
        return [digest(batch) for batch in batches[:2]]

    assert are_same_batches([first_two(rows)] * num_ranks) == (rows[:size] != rows[size : 2 * size])
    shards = [first_two(list(range(rank, 20, num_ranks))) for rank in range(num_ranks)]
    assert not are_same_batches(shards)


def test_equal_batches_have_equal_digests() -> None:
    def batch(value: float) -> dict[str, Any]:
        return {"a": torch.tensor(value), "b": [torch.ones(2, 3, dtype=torch.bfloat16), "text"], "c": None}

    assert digest(batch(1.0)) == digest(batch(1.0)) != digest(batch(2.0))
    assert digest(torch.zeros(2).to_sparse()) == digest(torch.zeros(2).to_sparse())
