"""Cross-validation: each row is in one validation subset and is not copied; stratified and grouped folds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.data.cross_validation import to_cv
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.order.epoch_order import SHUFFLES, Shuffle
from raysgd.data.shard import DatasetShard
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError


class Store:
    """A double of the object store that records what is put."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def fetch(self, ref: int) -> Any:
        return self.values[ref]


def shard(given: Any, store: Store, rank: int = 0, world_size: int = 1, **options: Any) -> DatasetShard:
    plan = resolve_datasets(given, store.put, session=store)
    return WorkerDatasets(plan, rank, world_size, 0, fetch=store.fetch, **options).get().get_split()


def column(subset: Any, name: str = "x", store: Store | None = None, **options: Any) -> list[Any]:
    batches = shard(subset, store or Store()).iter_batches(4, **options)
    return [value for batch in batches for value in batch[name].tolist()]


class Items(Sequence[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index * 10


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.data(), st.integers(0, 9), st.sampled_from(SHUFFLES), st.integers(1, 3))
def test_each_row_is_in_one_validation_subset(
    num_rows: int, data: st.DataObject, seed: int, shuffle: Shuffle, num_blocks: int
) -> None:
    splits = data.draw(st.integers(2, min(num_rows, 6)))
    rows = pd.DataFrame({"x": np.arange(num_rows)})
    pairs = to_cv(rows, splits, seed)
    seen: Counter[int] = Counter()
    for train, validation in pairs:
        chosen, others = (column(subset, shuffle=shuffle) for subset in (validation, train))
        assert sorted(chosen + others) == list(range(num_rows))
        assert (len(validation), len(train)) == (len(chosen), len(others))
        assert shuffle is not False or chosen == sorted(chosen)
        seen.update(chosen)
    assert seen == Counter(range(num_rows))
    sizes = [len(validation) for _, validation in pairs]
    assert max(sizes) - min(sizes) <= 1


def test_seed_selects_the_folds() -> None:
    rows = {"x": np.arange(50)}
    first = [column(validation) for _, validation in to_cv(rows, 5, seed=1)]
    assert first == [column(validation) for _, validation in to_cv(rows, 5, seed=1)]
    assert first != [column(validation) for _, validation in to_cv(rows, 5, seed=2)]


def test_subsets_of_all_kinds_of_datasets(tmp_path: Path) -> None:
    table = pa.table({"x": range(23)})
    for number in range(3):
        pq.write_table(table.slice(8 * number, 8), tmp_path / f"{number}.parquet", row_group_size=3)
    for dataset in (table, {"x": np.arange(23)}, table.to_pandas(), tmp_path, table.to_pylist()):
        for train, validation in to_cv(dataset, 3):
            for shuffle in (False, "window"):
                found = column(train, shuffle=shuffle) + column(validation, shuffle=shuffle)
                assert sorted(found) == list(range(23))
    for train, validation in to_cv(Items(), 3):
        rows_of_subsets = [list(shard(subset, Store()).iter_rows()) for subset in (train, validation)]
        assert sorted(rows_of_subsets[0] + rows_of_subsets[1]) == [10 * n for n in range(23)]
        batches = list(shard(train, Store()).to_torch(4))
        assert [len(batch) for batch in batches] == [4, 4, 4, len(train) - 12]


def test_workers_split_a_subset_and_resume_inside_it(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "a.parquet", row_group_size=7)
    (train, _), *_ = to_cv(tmp_path, 4)
    store = Store()
    plan = resolve_datasets(train, store.put)

    def worker_datasets(world_size: int, positions: Any = None) -> list[WorkerDatasets]:
        return [WorkerDatasets(plan, rank, world_size, 3, positions, fetch=store.fetch) for rank in range(world_size)]

    group = worker_datasets(2)
    loops = [iter(datasets.get().get_split().iter_batches(3, shuffle="window")) for datasets in group]
    seen = [row for _ in range(3) for loop in loops for row in next(loop)["x"].tolist()]
    saved = json.loads(json.dumps(group[0].positions()))
    assert saved == group[1].positions()
    (single_worker,) = worker_datasets(1, saved)
    seen += [
        row
        for batch in single_worker.get().get_split().iter_batches(4, shuffle="window")
        for row in batch["x"].tolist()
    ]
    assert sorted(seen) == sorted(column(train))


def test_rows_are_stored_once_for_all_subsets_and_runs() -> None:
    store = Store()
    pairs = to_cv({"x": np.arange(1000)}, 4)
    for train, validation in pairs:
        plan = resolve_datasets({"train": train, "validation": validation}, store.put, session=store)
        assert plan.sources["train"].blocks == plan.sources["validation"].blocks
    resolve_datasets(pairs, store.put, session=store)
    assert len(store.values) == 2  # the rows, and the fold of each
    assert store.values[1].nbytes == 2000
    other_store = Store()
    resolve_datasets(pairs, other_store.put, session=other_store)
    assert len(other_store.values) == 2


def test_consecutive_rows_of_a_subset_are_a_view() -> None:
    store = Store()
    pairs = to_cv({"x": np.arange(100)}, 2, group=np.arange(100) // 50)
    for _, validation in pairs:
        (batch,) = shard(validation, store).iter_batches(50)
        assert np.shares_memory(batch["x"], store.values[0]["x"])


def test_folds_by_class_and_by_group() -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation([0] * 80 + [1] * 20)
    rows = pa.table({"x": range(100), "label": labels.astype(str), "patient": np.arange(100) // 4})
    for _, validation in to_cv(rows, 5, stratify="label"):
        assert sorted(column(validation, "label")) == ["0"] * 16 + ["1"] * 4
    for _, validation in to_cv(rows, 5, stratify=labels):
        assert Counter(column(validation, "label")) == {"0": 16, "1": 4}
    folds = [set(column(validation, "patient")) for _, validation in to_cv(rows, 5, group="patient")]
    assert sum(map(len, folds)) == len(set.union(*folds)) == 25
    both = to_cv(rows, 5, stratify="label", group="patient")
    folds = [set(column(validation, "patient")) for _, validation in both]
    assert sum(map(len, folds)) == 25


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"x": np.arange(3)}, {"splits": 5}, "needs at least 5 rows; the dataset has 3"),
        ({"x": np.arange(3)}, {"splits": 1}, "splits"),
        ({"x": np.arange(9)}, {"splits": 3, "stratify": "y"}, "no column 'y'"),
        ({"x": np.arange(9)}, {"splits": 3, "group": [1, 2]}, "one value for each of the 9 rows"),
        ({"x": np.arange(9)}, {"splits": 3, "group": np.zeros(9)}, r"to_cv\(splits=3\): Cannot have"),
        ({"a": {"x": np.arange(9)}, "b": {"x": np.arange(9)}}, {}, "takes one dataset"),
        (Items(), {"stratify": "x"}, "map-style dataset have no columns"),
        (7, {}, "cannot read"),
    ],
)
def test_arguments_that_cannot_be_split_are_refused(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_cv(given, **options)
