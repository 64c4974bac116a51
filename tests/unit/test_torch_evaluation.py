"""Rows that are counted once: samplers that take their rank's shard, evaluations, and values gathered for metrics."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import raysgd
from raysgd.errors import ConfigError, UsageError
from raysgd.torch import prepare_data_loader
from raysgd.torch.batches import without_rows
from support.loader_draws import Enter, on_ranks, worlds

NUM = 13


class Rows(Dataset[Any]):
    def __init__(self, num: int = NUM) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return {"x": index, "name": f"row {index}"}


class OwnShard(Sampler[int]):
    """Takes each N-th row, and says so under the names that it is given."""

    def __init__(self, num: int, rank: int, size: int, names: tuple[str, str]) -> None:
        self.rows = range(rank, num, size)
        setattr(self, names[0], size)
        setattr(self, names[1], rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class Padded(OwnShard):
    """Repeats the first row, so that all ranks have equally many."""

    def __init__(self, num: int, rank: int, size: int) -> None:
        super().__init__(num, rank, size, ("num_replicas", "rank"))
        self.rows = [*self.rows, *[0] * (-(-num // size) - len(self.rows))]  # type: ignore[assignment]


class OwnBatches(Sampler[list[int]]):
    """Batches of the rank's shard; the sampler says nothing of ranks."""

    def __init__(self, rows: range) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(self.rows[:2]), list(self.rows[2:])])

    def __len__(self) -> int:
        return 2


@pytest.fixture
def world() -> Iterator[Enter]:
    with worlds() as enter:
        yield enter


def read(loader: Any) -> list[int]:
    return [row for batch in loader for row in batch["x"].tolist()]


def read_on_ranks(world: Enter, make: Callable[[int], Any], size: int, **prepare: Any) -> list[list[int]]:
    return on_ranks(world, size, lambda rank: read(prepare_data_loader(make(rank), **prepare)))


# -- samplers that take their rank's shard --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [("num_replicas", "rank"), ("world_size", "rank"), ("_world_size", "_rank"), ("num_shards", "shard_id")],
)
@pytest.mark.parametrize("train", [True, False])
def test_sampler_that_says_its_shard_is_not_divided_again(world: Enter, names: tuple[str, str], train: bool) -> None:
    def make(rank: int) -> Any:
        return DataLoader(Rows(), batch_size=4, sampler=OwnShard(NUM, rank, 3, names))

    assert read_on_ranks(world, make, 3, train=train) == [list(range(rank, NUM, 3)) for rank in range(3)]


SHARDS = {
    "sampler": lambda rank: {"sampler": SubsetRandomSampler(range(rank, NUM, 2)), "batch_size": 4},
    "list": lambda rank: {"sampler": list(range(rank, NUM, 2)), "batch_size": 4},
    "part of the rows": lambda rank: {"sampler": list(range(rank, NUM - 4, 2)), "batch_size": 4},
    "batches": lambda rank: {"batch_sampler": OwnBatches(range(rank, NUM, 2))},
}


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("train", [True, False])
def test_sampler_that_yields_a_shard_is_found_by_its_order(world: Enter, kind: str, train: bool) -> None:
    ranks = read_on_ranks(world, lambda rank: DataLoader(Rows(), **SHARDS[kind](rank)), 2, train=train)
    given = [
        sorted(row for batch in DataLoader(Rows(), **SHARDS[kind](rank)) for row in batch["x"].tolist())
        for rank in (0, 1)
    ]
    assert [sorted(rows) for rows in ranks] == given


def test_sampler_of_a_part_of_the_rows_is_divided_with_a_warning_where_it_might_be_a_shard(
    world: Enter, caplog: pytest.LogCaptureFixture
) -> None:
    def make(num: int) -> Callable[[int], Any]:
        return lambda rank: DataLoader(Rows(), sampler=SubsetRandomSampler(range(num)))

    assert sorted(chain(*read_on_ranks(world, make(4), 2))) == [0, 1, 2, 3]
    assert not caplog.records
    assert sorted(chain(*read_on_ranks(world, make(6), 2))) == [0, 1, 2, 3, 4, 5]
    assert "SubsetRandomSampler yields 6 of 13 rows, the same on all 2 ranks" in caplog.text
    assert "pass add_sampler=False" in caplog.text


def test_sampler_that_draws_from_seeded_generators_is_divided(world: Enter) -> None:
    def make(rank: int) -> Any:
        torch.manual_seed(rank)
        return DataLoader(Rows(), batch_size=2, sampler=WeightedRandomSampler([1.0] * NUM, NUM, replacement=False))

    assert sorted({row for rows in read_on_ranks(world, make, 3) for row in rows}) == list(range(NUM))


def test_shard_of_another_rank_and_order_of_each_rank_alone_are_refused(world: Enter) -> None:
    other = DataLoader(Rows(), sampler=OwnShard(NUM, 1, 4, ("num_replicas", "rank")))
    world(1, 2)
    with pytest.raises(
        ConfigError, match=r"OwnShard takes the shard of rank 1 of 4, and this worker reads that of rank 1 of 2"
    ):
        prepare_data_loader(other)
    world(1, 4, workers_per_replica=2)  # ranks of one copy must read the same rows
    with pytest.raises(
        ConfigError, match=r"this worker reads that of rank 0 of 2: make it with raysgd.data_parallel_rank"
    ):
        prepare_data_loader(other)
    assert prepare_data_loader(other, add_sampler=False).sampler is other.sampler
    orders = [random.Random(rank).sample(range(NUM), NUM) for rank in range(2)]
    with pytest.raises(ConfigError, match="different orders on the ranks, of 26 rows together"):
        read_on_ranks(world, lambda rank: DataLoader(Rows(), sampler=orders[rank]), 2)


def test_sampler_of_one_replica_is_divided(world: Enter) -> None:
    def make(rank: int) -> Any:
        return DataLoader(Rows(), sampler=DistributedSampler(Rows(), num_replicas=1, rank=0, shuffle=False))  # type: ignore[arg-type]

    assert read_on_ranks(world, make, 2, train=False) == [list(range(0, NUM, 2)), list(range(1, NUM, 2))]


# -- evaluations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "global", "batches"])
@settings(max_examples=40)
@given(num=st.integers(1, 30), size=st.integers(1, 5), batch_size=st.integers(1, 7))
def test_evaluation_reads_each_row_once_in_equally_many_batches(
    kind: str, num: int, size: int, batch_size: int
) -> None:
    def make() -> Any:
        if kind == "batches":
            order: Any = SequentialSampler(range(num))
            return DataLoader(Rows(num), batch_sampler=type("Own", (BatchSampler,), {})(order, batch_size, False))
        return DataLoader(Rows(num), batch_size=batch_size)

    more = {"global_batch_size": max(batch_size, size)} if kind == "global" else {}

    def count(rank: int) -> Any:
        loader = prepare_data_loader(make(), train=False, **more)
        batches = [(batch["x"].tolist(), batch["name"]) for batch in loader]
        assert len(batches) == len(loader)
        return batches

    with worlds() as world:
        ranks = on_ranks(world, size, count)
    rows = [batch for batches in ranks for batch in batches]
    assert sorted(row for numbers, _ in rows for row in numbers) == list(range(num))
    assert all(names == [f"row {row}" for row in numbers] for numbers, names in rows)
    assert len({len(batches) for batches in ranks}) == 1
    if kind == "rows":
        steps = list(zip(*ranks, strict=True))
        in_order = [row for step in steps for row in sorted(row for numbers, _ in step for row in numbers)]
        assert in_order == list(range(num)), "steps follow the order of the data"
        assert num < size or batch_size == 1 or all(numbers for numbers, _ in rows), "no batch is empty without need"


def test_evaluation_drops_the_repeats_of_torch_distributed_sampler_and_refuses_others(world: Enter) -> None:
    def make(rank: int) -> Any:
        return DataLoader(Rows(), batch_size=3, sampler=DistributedSampler(Rows(), 2, rank, shuffle=True))  # type: ignore[arg-type]

    assert sorted(chain(*read_on_ranks(world, make, 2, train=False))) == list(range(NUM))
    assert sum(map(len, read_on_ranks(world, make, 2))) == NUM + 1
    with pytest.raises(ConfigError, match="Padded yields 14 rows on all ranks together, and the dataset has 13"):
        read_on_ranks(world, lambda rank: DataLoader(Rows(), sampler=Padded(NUM, rank, 2)), 2, train=False)


def test_evaluation_of_single_items_and_with_drop_last(world: Enter) -> None:
    def items(rank: int) -> list[int]:
        return [item["x"] for item in prepare_data_loader(DataLoader(Rows(5), batch_size=None), train=False)]

    assert on_ranks(world, 2, items) == [[0, 2, 4], [1, 3]]
    ranks = read_on_ranks(world, lambda rank: DataLoader(Rows(), batch_size=4, drop_last=True), 2, train=False)
    assert sorted(chain(*ranks)) == list(range(8))


def test_loader_prepared_for_training_is_prepared_again_for_an_evaluation(world: Enter) -> None:
    def ranks(rank: int) -> list[int]:
        prepared = prepare_data_loader(DataLoader(Rows(), batch_size=4))
        again = prepare_data_loader(prepared, train=False)  # type: ignore[arg-type]
        assert prepare_data_loader(again) is again  # type: ignore[arg-type]
        return read(again)

    assert sorted(chain(*on_ranks(world, 2, ranks))) == list(range(NUM))


@dataclasses.dataclass
class Batch:
    x: Any
    text: Any


def test_batch_without_rows_keeps_its_structure() -> None:
    pair = collections.namedtuple("Pair", "a b")
    batch = {
        "x": torch.ones(2, 3),
        "pair": pair(np.ones((2, 1)), ["a", "b"]),
        "scale": torch.tensor(2.0),
        "more": [torch.ones(2)],
    }
    cut = without_rows(batch)
    assert cut["x"].shape == (0, 3) and cut["pair"].a.shape == (0, 1) and cut["pair"].b == []
    assert cut["scale"] == 2.0 and cut["more"][0].shape == (0,) and type(cut["pair"]) is pair
    own = without_rows(Batch(torch.ones(2), ["a", "b"]))
    assert (own.x.shape, own.text) == ((0,), [])
    for wrong in (object(), {"x": torch.ones(2), "graph": object()}):
        with pytest.raises(
            UsageError, match="an object cannot be made a batch without rows: give a batch_size of 2 or more"
        ):
            without_rows(wrong)


# -- values for metrics -----------------------------------------------------------------------------------------------------


def gather_rows(rank: int, num: int, batch_size: int, train: bool) -> list[Any]:
    engine = raysgd.Engine()
    data = TensorDataset(torch.arange(num))
    batches = []
    for (x,) in prepare_data_loader(DataLoader(data, batch_size=batch_size), train=train):
        values = {"twice": (2 * x, torch.stack([x, x], 1)), "names": [f"row {row}" for row in x.tolist()]}
        batches.append(engine.gather_for_metrics(values))
    return batches


@pytest.mark.parametrize("train", [True, False])
@settings(max_examples=15, deadline=None)
@given(num=st.integers(1, 14), size=st.integers(2, 4), batch_size=st.integers(1, 4))
def test_gathered_values_count_each_row_once_in_the_order_of_the_data(
    train: bool, num: int, size: int, batch_size: int
) -> None:
    with worlds() as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysgd.engine.engine.check_workers", lambda *_: None)
        ranks = on_ranks(world, size, lambda rank: gather_rows(rank, num, batch_size, train))
    for batches in ranks:
        assert torch.cat([batch["twice"][0] for batch in batches]).tolist() == list(range(0, 2 * num, 2))
        assert torch.cat([batch["twice"][1] for batch in batches]).tolist() == [[row, row] for row in range(num)]
        assert [name for batch in batches for name in batch["names"]] == [f"row {row}" for row in range(num)]


def test_values_that_are_not_of_rows_are_refused(world: Enter) -> None:
    world(0, 2)
    engine = object.__new__(raysgd.Engine)
    loader = prepare_data_loader(DataLoader(Rows(), batch_size=4))
    batch = next(iter(loader))
    with pytest.raises(UsageError, match=r"a tensor without dimensions; give tensors .* loss.expand\(num_rows\)"):
        engine.gather_for_metrics(batch["x"].float().mean())
    with pytest.raises(UsageError, match="got 9 entries for a batch of a loader that repeats rows"):
        engine.gather_for_metrics(torch.ones(9))
    del loader
