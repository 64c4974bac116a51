"""Column types: each is converted correctly, or refused by its name."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.shard import DatasetShard
from raysgd.data.sources import memory
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError


def shard_of(column: Any) -> DatasetShard:
    plan = resolve_datasets({"train": pa.table({"c": column})}, lambda value: value)
    return WorkerDatasets(plan, 0, 1, 0, fetch=lambda value: value).get().get_split()


def tensor_of(column: Any, **options: Any) -> torch.Tensor:
    tensors = [batch["c"] for batch in shard_of(column).to_torch(2, **options)]
    return torch.cat(tensors)


TENSOR = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.int16).reshape(3, 2, 2))
NESTED = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pa.array(range(12)), 2), 2)

GOOD = [
    (pa.array([1, 2, 3], pa.int8()), [1, 2, 3], torch.int8),
    (pa.array([1, 2, 3], pa.uint16()), [1, 2, 3], torch.uint16),
    (pa.array(np.array([1, 2, 3], np.float16)), [1, 2, 3], torch.float16),
    (pa.array([True, False, True]), [True, False, True], torch.bool),
    (pa.array([0, 1, 2, 3, 4])[2:], [2, 3, 4], torch.int64),
    (pa.chunked_array([[1], [2, 3]]), [1, 2, 3], torch.int64),
    (pa.array([5, 7, 5]).dictionary_encode(), [5, 7, 5], torch.int64),
    (pa.array([[1, 2], [3, 4], [5, 6]]), [[1, 2], [3, 4], [5, 6]], torch.int64),
    (pa.array([[9.0], [1.0], [2.0], [3.0]], pa.large_list(pa.float32()))[1:], [[1], [2], [3]], torch.float32),
    (pa.array([[9, 9], [1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))[1:], [[1, 2], [3, 4], [5, 6]], torch.int32),
    (NESTED, np.arange(12).reshape(3, 2, 2).tolist(), torch.int64),
    (TENSOR, np.arange(12).reshape(3, 2, 2).tolist(), torch.int16),
]


@pytest.mark.parametrize(("column", "values", "dtype"), GOOD, ids=[str(column.type) for column, _, _ in GOOD])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_numbers_become_tensors(
    column: Any, values: Any, dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BLOCK_BYTES", block_bytes)  # 1: each row is a block
    tensor = tensor_of(column)
    assert tensor.dtype == dtype
    assert tensor.tolist() == values
    mixed = tensor_of(column, shuffle="full")
    assert sorted(mixed.tolist()) == sorted(values)
    assert tensor_of(column, shuffle="window").dtype == dtype


REFUSED = [
    (pa.array(["a", "b"]), "holds strings, for which torch has no type"),
    (pa.array(["a", None]), "holds strings"),
    (pa.array([b"a", b"b"]), "holds strings"),
    (pa.array(["a", "b"]).dictionary_encode(), "holds strings"),
    (pa.array([Decimal("1.5"), Decimal("2")]), "holds Decimal objects"),
    (pa.array([dt.datetime(2020, 1, 1)] * 2), r"holds datetime64\[us\]"),
    (pa.array([{"a": 1}, {"a": 2}]), "holds dict objects"),
    (pa.array([["a"], ["b"]]), "holds strings"),
    (pa.array([[1], [2, 3]]), r"is ragged: one batch has rows of shape \(1,\) and of shape \(2,\)"),
    (pa.array([1, None, 3]), "has 1 nulls among 3 values of int64"),
    (pa.array([1.0, None]), "has 1 nulls among 2 values of double"),
    (pa.array([True, None]), "has 1 nulls"),
    (pa.array([[1, 2], None]), "has 1 nulls"),
    (pa.array([[1, None]]), "has 1 nulls"),
    (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), "has 1 nulls"),
    (pa.array([[1, None]], pa.list_(pa.int64(), 2)), "has 1 nulls"),
    (pa.array([1, None]).dictionary_encode(), "has 1 nulls"),
    (pa.nulls(2), "holds NoneType objects"),
]


@pytest.mark.parametrize(
    ("column", "message"), REFUSED, ids=[f"{column.type} {column.null_count}" for column, _ in REFUSED]
)
def test_unsupported_column_is_refused_with_dataset_and_column(column: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"column 'c' of dataset 'train' {message}"):
        tensor_of(column)


def test_pandas_and_pyarrow_batches_keep_nulls() -> None:
    shard = shard_of(pa.array([1, None, 3]))
    (table,) = shard.iter_batches(3, format="pyarrow")
    assert table.column("c").to_pylist() == [1, None, 3]
    (frame,) = shard.iter_batches(3, format="pandas")
    assert frame.c.isna().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array(["a", None, "c"]), ["a", None, "c"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.array([Decimal("1.50"), None, Decimal("2.00")]), [Decimal("1.50"), None, Decimal("2.00")]),
        (pa.array([dt.date(2020, 1, 1)] * 3), [np.datetime64("2020-01-01")] * 3),
        (pa.array([{"a": 1}, {"a": 2}, {"a": 3}]), [{"a": 1}, {"a": 2}, {"a": 3}]),
    ],
)
def test_other_types_become_numpy_arrays(column: Any, values: list[Any]) -> None:
    assert [row["c"] for row in shard_of(column).iter_rows()] == values


def test_lists_become_one_array_per_row() -> None:
    for column in (pa.array([[1], [2, 3], []]), pa.array([[1, 2], [3, 4], [5, 6]])):
        (batch,) = shard_of(column).iter_batches(3)
        assert batch["c"].shape == (3,)
        assert [row.tolist() for row in batch["c"]] == column.to_pylist()


def test_blocks_of_different_types_are_refused() -> None:
    plan = resolve_datasets({"train": {"c": np.arange(4)}}, lambda value: value)
    source = plan.sources["train"]
    other = type(source)("arrays", ({"c": np.arange(2)}, {"c": np.zeros((2, 3))}), (2, 2))
    plan.sources["train"] = other
    shard = WorkerDatasets(plan, 0, 1, 0, fetch=lambda value: value).get().get_split()
    with pytest.raises(
        ConfigError, match=r"column 'c' .* float64 of shape \(3,\) in block 1 and int64 of shape \(\) in others"
    ):
        list(shard.to_torch(3))


MEGABYTES = [bytes([number]) * 2**20 for number in range(97, 123)]
#: 2.2 GiB of text, of which only 26 MB are in memory: chunks are the same where their text is.
LARGE = {
    "text": [pa.array([each.decode()]) for each in MEGABYTES],
    "bytes": [pa.array([each]) for each in MEGABYTES],
    "lists of text": [pa.array([[each.decode()]]) for each in MEGABYTES],
}


@pytest.mark.parametrize("format", ["numpy", "pandas", "pyarrow"])
@pytest.mark.parametrize("kind", LARGE)
def test_block_has_more_text_than_a_chunk_can(kind: str, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK_BYTES", 2**40)  # all in one block
    column = pa.chunked_array([LARGE[kind][row % 26] for row in range(2260)])
    assert column.nbytes > 2**31
    plan = resolve_datasets(pa.table({"row": range(2260), "c": column}), lambda value: value)
    shard = WorkerDatasets(plan, 0, 1, 0, fetch=lambda value: value).get().get_split()
    shuffles: list[Any] = [False, "full"]
    for shuffle in shuffles:
        batch = next(iter(shard.iter_batches(64, shuffle=shuffle, format=format)))
        batch = batch.to_pydict() if format == "pyarrow" else batch
        values = [value[0] if kind == "lists of text" else value for value in batch["c"]]
        values = [value if isinstance(value, bytes) else value.encode() for value in values]
        assert values == [MEGABYTES[row % 26] for row in batch["row"]]
        assert len(values) == 64
