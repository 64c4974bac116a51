"""A column has one type in all batches of all ranks, and its values are exact; what cannot be so is refused."""

from __future__ import annotations

import datetime as dt
import pickle
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.plan import DatasetPlan, Source
from raysgd.data.shard import DatasetShard
from raysgd.data.sources import column_types
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError

BIG = 2**60 + 1


def shard_of(dataset: Any, rank: int = 0, size: int = 1) -> DatasetShard:
    plan = resolve_datasets({"d": dataset}, lambda value: value)
    return WorkerDatasets(plan, rank, size, 0, fetch=lambda value: value).get().get_split()


def files(folder: Path, *columns: Any, name: str = "c") -> str:
    for number, column in enumerate(columns):
        pq.write_table(
            pa.table({name: column, "row": [10 * number + row for row in range(len(column))]}),
            folder / f"{number}.parquet",
        )
    return str(folder)


def frames_of(shard: DatasetShard, size: int = 1) -> tuple[set[str], list[Any]]:
    """Return the types and the values of column c in pandas."""
    frames = list(shard.iter_batches(size, format="pandas"))
    values = [None if value is None or pd.isna(value) else value for frame in frames for value in frame.c]
    return {str(frame.c.dtype) for frame in frames}, values


INTS = pa.array([1, BIG, 3])
MIXED: dict[str, tuple[list[Any], str]] = {
    "integers": ([INTS, pa.array([4, None, BIG])], "Int64"),
    "integers without nulls": ([INTS, pa.array([4, 5])], "int64"),
    "unsigned": ([pa.array([1, 2], pa.uint8()), pa.array([None, 4], pa.uint8())], "UInt8"),
    "booleans": ([pa.array([True, False]), pa.array([None, True])], "boolean"),
    "a file of nulls": ([INTS, pa.nulls(2)], "Int64"),
    "sizes of integers": ([pa.array([1, 2], pa.int32()), pa.array([BIG, 4])], "int64"),
    "floats and integers": ([pa.array([0.5, None]), pa.array([4, 5])], "float64"),
    "integers and floats": ([pa.array([4, 5]), pa.array([0.5, None])], "float64"),
    "dictionaries": ([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", None]).dictionary_encode()], "str"),
    "dictionary and strings": ([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "d"])], "str"),
    "decimals": (
        [pa.array([Decimal("1.5")], pa.decimal128(4, 1)), pa.array([Decimal("2.25"), None], pa.decimal128(5, 2))],
        "object",
    ),
    "dates": ([pa.array([dt.date(2026, 1, 1)]), pa.array([None, dt.date(2026, 1, 2)])], "object"),
}


@pytest.mark.parametrize("kind", MIXED)
def test_column_of_several_files_has_one_type_and_exact_values_in_pandas(kind: str, tmp_path: Path) -> None:
    columns, expected = MIXED[kind]
    dataset = files(tmp_path, *columns)
    ranks = [frames_of(shard_of(dataset, rank, 2), 1) for rank in (0, 1)]
    assert {each for types, _ in ranks for each in types} == {expected}
    given = [value for column in columns for value in column.to_pylist()]
    read = [value for _, values in ranks for value in values]
    assert Counter(read) == Counter(given)
    if expected.startswith(("Int", "int")):
        assert all(type(value) is not float for value in read), "no integer passed through a floating-point number"


def test_nulls_among_numbers_are_refused_before_the_first_batch(tmp_path: Path) -> None:
    dataset = files(tmp_path, INTS, INTS, pa.array([None, None, 4]))
    shard = shard_of(dataset)
    message = r"column 'c' of dataset 'd' has 2 nulls among 9 values of int64, which NumPy and torch cannot represent"
    for read in (
        lambda: shard.to_torch(1),
        lambda: shard.iter_batches(1),
        lambda: shard.to_torch(1, collate_fn=list),
        shard.iter_rows,
    ):
        with pytest.raises(ConfigError, match=message):
            read()
    assert len(list(shard.to_torch(1, columns=["row"]))) == 9
    assert len(list(shard.iter_batches(1, format="pyarrow"))) == 9
    with pytest.raises(ConfigError, match="has 1 nulls among 2 values of double"):
        shard_of(pa.table({"c": [1.5, None]})).to_torch(1)


def test_files_without_metadata_have_nullable_columns_in_pandas(tmp_path: Path) -> None:
    for number, text in enumerate(["c\n1\n2\n", f"c\n3\n{BIG}\n", 'c\n""\n5\n']):
        (tmp_path / f"{number}.csv").write_text(text)
    types, values = frames_of(shard_of(str(tmp_path)), 1)
    assert types == {"Int64"} and values == [1, 2, 3, BIG, None, 5]


def test_nulls_are_unknown_where_there_are_too_many_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = files(tmp_path, INTS, INTS)
    monkeypatch.setattr(column_types, "_MAX_STATISTICS", 3)
    assert frames_of(shard_of(dataset))[0] == {"Int64"}
    assert len(list(shard_of(dataset).to_torch(2))) == 3


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (pa.array([True, False]), pa.array([1, 2]), r"has type int64 in .*1.parquet and bool in other files"),
        (pa.array([1, 2]), pa.array([True, False]), r"has type bool in .*1.parquet and int64 in other files"),
        (pa.array([Decimal("0.1")]), pa.array([0.1]), r"has type double in .*1.parquet and decimal128\(1, 1\)"),
        (pa.array([1]), pa.array([dt.datetime(2026, 1, 1)]), r"has type timestamp\[us\] in"),
        (
            pa.array([0.5]),
            pa.array([BIG]),
            rf"has integers up to {BIG} in .*1.parquet and floating-point numbers in other files",
        ),
        (pa.array([BIG]), pa.array([0.5]), rf"has integers up to {BIG} in .*0.parquet and floating-point numbers"),
    ],
)
def test_files_whose_values_no_type_holds_are_refused(one: Any, other: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"column 'c' .*{message}"):
        shard_of(files(tmp_path, one, other))


def test_lists_with_gaps_are_refused_in_pandas_which_would_round_them() -> None:
    shard = shard_of(pa.table({"c": [[1], [BIG, None]]}))
    batches = shard.iter_batches(1, format="pandas")
    with pytest.raises(ConfigError, match="column 'c' of dataset 'd' has nulls within its lists of whole numbers"):
        list(batches)
    assert [
        row
        for batch in shard_of(pa.table({"c": [[1], [BIG, 2]]})).iter_batches(1, format="pandas")
        for row in batch.c[0]
    ] == [1, BIG, 2]


def test_rows_with_gaps_have_the_type_of_all_rows() -> None:
    shard = shard_of([{"c": 1}, {"c": 2.5}, {"c": None}])
    batches = shard.to_torch(1)
    first = next(iter(batches))
    assert str(first["c"].dtype) == "torch.float64"
    for rows in ([{"c": BIG}, {"c": 0.5}], [{"c": BIG}, {"c": 0.5}, {"c": None}], [{"c": 2**63 + 1}, {"c": -1}]):
        with pytest.raises(
            ConfigError, match=r"column 'c' of dataset 'd' has the integer \d+ in row 0 and a type that cannot"
        ):
            shard_of(rows)


def test_features_whose_common_type_rounds_integers_are_refused() -> None:
    table = pa.table({"id": [2**24 + 1, 2], "score": pa.array([0.5, 1.5], pa.float32()), "label": [0, 1]})
    with pytest.raises(
        ConfigError, match=r"column 'id' of dataset 'd' has integers above 16777216, which torch.float32, the"
    ):
        list(shard_of(table).to_torch(2, label_column="label"))
    ((x, _),) = shard_of(table).to_torch(2, label_column="label", dtypes=torch.float64)
    assert x.tolist() == [[2**24 + 1, 0.5], [2, 1.5]]
    ((x, _),) = shard_of(table).to_torch(2, label_column="label", feature_columns=["id", "label"][:1])
    assert x.tolist() == [2**24 + 1, 2]


# -- blocks of a Ray dataset ------------------------------------------------------------------------------------------------


def blocks_shard(schema: Any, *blocks: Any) -> DatasetShard:
    pickled = None if schema is None else pickle.dumps(schema)
    source = Source("arrow", blocks, tuple(block.num_rows for block in blocks), schema=pickled)
    return WorkerDatasets(DatasetPlan({"d": source}), 0, 1, 0, fetch=lambda value: value).get().get_split()


def test_blocks_are_converted_to_the_type_of_all_blocks() -> None:
    blocks = pa.table({"c": [1, 2]}), pa.table({"c": [0.5, 1.5]})
    schema = column_types.common_schema_of_blocks("d", [block.schema for block in blocks])
    batches = list(blocks_shard(schema, *blocks).to_torch(2))
    assert [(str(batch["c"].dtype), batch["c"].tolist()) for batch in batches] == [
        ("torch.float64", [1.0, 2.0]),
        ("torch.float64", [0.5, 1.5]),
    ]
    assert column_types.common_schema_of_blocks("d", [blocks[0].schema] * 2) is None
    with pytest.raises(ConfigError, match="column 'c' of dataset 'd' cannot have the type double in all blocks"):
        list(blocks_shard(schema, pa.table({"c": [BIG]}), blocks[1]).to_torch(2))


@pytest.mark.parametrize("kind", ["numpy", "pandas", "pyarrow"])
def test_blocks_of_other_types_are_refused_where_no_schema_is_known(kind: Any) -> None:
    shard = blocks_shard(None, pa.table({"c": [1, 2]}), pa.table({"c": [0.5, 1.5]}))
    with pytest.raises(ConfigError, match=r"column 'c' .* has values of double in block 1 and int64 in others"):
        list(shard.iter_batches(2, format=kind))
    texts = blocks_shard(
        None, pa.table({"c": ["a"]}), pa.table({"c": pa.array(["b"]).dictionary_encode()}), pa.table({"c": pa.nulls(1)})
    )
    assert [row["c"] for row in texts.iter_rows()] == ["a", "b", None]
