"""What can be given as a dataset, how it reaches the workers, and how other arguments are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from scipy import sparse
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.plan import DatasetPlan
from raysgd.data.sources import memory
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError, SerializationError


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return index * index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Store:
    """A double of the object store: pickles what is put, and finds it by number."""

    def __init__(self) -> None:
        self.objects: list[bytes] = []

    def put(self, value: Any) -> int:
        self.objects.append(pickle.dumps(value))
        return len(self.objects) - 1

    def fetch(self, ref: int) -> Any:
        return pickle.loads(self.objects[ref])


def read(given: Any) -> list[Any]:
    """Return all rows as a worker reads them from the pickled plan."""
    store = Store()
    plan: DatasetPlan = pickle.loads(pickle.dumps(resolve_datasets(given, store.put)))
    return list(WorkerDatasets(plan, 0, 1, 0, fetch=store.fetch).get().get_split().iter_rows())


X, Y = np.arange(5.0), np.arange(10, dtype=np.int32).reshape(5, 2)
ROWS = [{"x": x, "y": y.tolist()} for x, y in zip(X, Y, strict=True)]
TABLE = pa.table({"x": X, "y": pa.FixedSizeListArray.from_arrays(Y.reshape(-1), 2)})


@pytest.mark.parametrize(
    "given",
    [
        {"x": X, "y": Y},
        {"x": torch.tensor(X, requires_grad=True), "y": torch.tensor(Y)},
        {"x": X.astype(">f8"), "y": np.asfortranarray(Y)},
        [{"x": float(x), "y": y} for x, y in zip(X, Y, strict=True)],
        [{"x": torch.tensor(x), "y": torch.tensor(y)} for x, y in zip(X, Y, strict=True)],
        TABLE,
        TABLE.to_batches()[0],
        pa.concat_tables([TABLE[:2], TABLE[2:]]),
        pd.DataFrame({"x": X, "y": list(Y)}, index=list("abcde")),
    ],
    ids=["arrays", "tensors", "layouts", "rows", "rows of tensors", "table", "record batch", "chunks", "frame"],
)
def test_tables_of_all_kinds_have_the_same_rows(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK_BYTES", 40)  # several blocks
    rows = [{"x": row["x"], "y": row["y"].tolist()} for row in read(given)]
    assert rows == ROWS


def test_map_style_datasets_are_indexed_by_the_worker() -> None:
    assert read(Squares()) == [0, 1, 4, 9, 16]
    assert read([(1, "a"), (2, "b")]) == [(1, "a"), (2, "b")]
    assert [pair[0].item() for pair in read(TensorDataset(torch.arange(3)))] == [0, 1, 2]


def test_items_keep_their_type() -> None:
    rows = [{"name": "ab", "lengths": [1, 2]}, {"name": "c", "lengths": [3]}]
    assert [{"name": row["name"], "lengths": list(row["lengths"])} for row in read(rows)] == rows


def test_nan_in_a_data_frame_is_not_null() -> None:
    (first, second) = read(pd.DataFrame({"x": [np.nan, 1.0]}))
    assert np.isnan(first["x"]) and second["x"] == 1


def test_plan_is_small_and_each_object_is_stored_once() -> None:
    store, big = Store(), {"x": np.zeros(100_000)}
    plan = resolve_datasets(tuple((big, {"x": np.ones(3)}) for _ in range(3)), store.put)
    assert len(pickle.dumps(plan)) < 1000
    assert len(store.objects) == 4
    assert plan.folds == tuple((f"{fold}/train", f"{fold}/validation") for fold in range(3))


def test_large_tables_are_stored_in_blocks() -> None:
    store = Store()
    (source,) = resolve_datasets({"x": np.zeros((30, 2**20))}, store.put).sources.values()
    assert source.block_rows == (8, 8, 8, 6)
    assert max(map(len, store.objects)) < memory.BLOCK_BYTES + 1000


def test_no_dataset_gives_an_empty_plan() -> None:
    with pytest.raises(ConfigError, match=r"the run has no dataset: give one as run\("):
        WorkerDatasets(resolve_datasets(None, id), 0, 1, None, fetch=id).get("train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (pd.Series(X), r"is of type Series, one column; give a table, such as series\.to_frame\(\)\."),
        (pd.DataFrame({"x": X}).groupby("x"), r"type DataFrameGroupBy, whose items are groups; give the DataFrame"),
        (pa.array(X), r"type DoubleArray, a column without a name; give \{'x': array\}"),
        (TABLE["x"], "type ChunkedArray, a column without a name"),
        (TABLE.schema, "type Schema, which has no rows"),
        (sparse.eye_array(3).tocsr(), r"type csr_array, a sparse matrix; give \{'x': matrix\.toarray\(\)\}"),
        (torch.nn.Sequential(torch.nn.ReLU()), "type Sequential, a model"),
        (DataLoader(TensorDataset(torch.zeros(3))), r"type DataLoader, which makes batches; give .* loader\.dataset"),
        ([TABLE, TABLE], "is a list, and its item 0 is a Table, not a row; give one table of all rows"),
        ([pd.DataFrame({"x": X})], "is a list, and its item 0 is a DataFrame, not a row"),
        ([None], "its item 0 is a NoneType, not a row"),
        ([{"x": 1}, 2], "its item 1 is an int, but item 0 is a dict; give items of one kind"),
        (["a.csv", 2], "its item 1 is an int, but item 0 is a str"),
        (memoryview(b"a"), "type memoryview, which raysgd cannot read"),
        (bytearray(b"a"), "type bytearray, which raysgd cannot read"),
        ({1, 2}, "type set, which raysgd cannot read"),
        ((n for n in range(3)), "type generator, which raysgd cannot read"),
        (map(str, [1]), "type map, which raysgd cannot read"),
        (lambda: TABLE, "type function, which raysgd cannot read"),
        (pd.DataFrame, "type type, which raysgd cannot read"),
        (0.5, "type float, which raysgd cannot read"),
        (3, r"'dataset' is of type int, which raysgd cannot read\. Give a path or URI"),
        ({"train": 3}, "'train' is of type int"),
        ({}, "dataset={} is empty"),
        ((), "is empty"),
        ((TABLE, (TABLE, TABLE, TABLE)), r"dataset\[1\] is a tuple of 3"),
        ((TABLE, None), "'1' is of type NoneType"),
        ({1: TABLE}, "has the name 1"),
        ({"train": {}}, "'train' is of type dict, which raysgd cannot read"),
        ({"x": X, "other": TABLE}, "an array under 'x' and a Table under 'other'"),
        ({"x": X, "y": X[:3]}, r"columns of different lengths: 'x' 5, 'y' 3\. A dict of arrays is one dataset"),
        ({"x": np.array(1.0)}, "column 'x' of dataset 'dataset' is a single number"),
        ({"x": torch.zeros(2, dtype=torch.bfloat16)}, r"column 'x' .* tensor of torch.bfloat16 .* \.float\(\)"),
        ({"x": torch.eye(2).to_sparse()}, r"column 'x' .* \.to_dense\(\)"),
        ({"x": np.ma.masked_array([1, 2], [0, 1])}, "column 'x' .* masked"),
        ({1: X}, "column named 1"),
        (pa.table([X, X], names=["x", "x"]), "2 columns named 'x'"),
        (pa.table({}), "no columns"),
        (pd.DataFrame({"x": [1, "a"]}), "column 'x' of dataset 'dataset' cannot be converted to an Arrow column"),
        ([{"x": 1}, {"y": 1}], r"row 1 of dataset 'dataset' has the keys \['y'\], but row 0 has \['x'\]"),
        (X, r"ndarray, a column without a name"),
        ("a.parquet", "no file or folder a.parquet"),
        (Path("a.parquet"), "no file or folder a.parquet"),
        (b"a.parquet", "is of type bytes, which raysgd cannot read"),
        (Stream(), "iterable torch Dataset, which cannot be split"),
    ],
)  # fmt: skip
def test_invalid_dataset_is_refused_with_the_reason(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_datasets(given, lambda value: value)


def test_dataset_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SerializationError, match="dataset 'train', a list, cannot be sent") as caught:
        resolve_datasets({"train": [lambda: 1]}, Store().put)
    assert caught.value.path == "dataset['train']"


def test_arrays_nested_in_dicts_lists_and_tuples_are_columns() -> None:
    tree = {"image": np.arange(6).reshape(3, 2), "boxes": {"xy": np.arange(3), "size": [np.ones(3), np.zeros(3)]}}
    rows = read(tree)
    assert list(rows[1]) == ["image", "boxes.xy", "boxes.size.0", "boxes.size.1"]
    assert (rows[1]["image"].tolist(), rows[1]["boxes.xy"], rows[1]["boxes.size.1"]) == ([2, 3], 1, 0.0)


def test_dict_of_datasets_is_not_taken_for_columns() -> None:
    plan = resolve_datasets({"train": {"x": np.ones(3)}, "test": {"x": np.ones(2)}}, Store().put)
    assert {name: source.num_rows for name, source in plan.sources.items()} == {"train": 3, "test": 2}
