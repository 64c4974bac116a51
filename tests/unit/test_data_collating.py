"""`collate_fn` that takes the columns of a batch, or its rows as the collators of torch and transformers do."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import default_collate

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.shard import DatasetShard
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError

TABLE = pa.table(
    {
        "ids": [[1], [2, 3], [4, 5, 6]],
        "pair": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32(), 2)),
        "label": [2**60 + 1, 0, 1],
        "text": ["a", "b", "c"],
    }
)


def shard() -> DatasetShard:
    plan = resolve_datasets({"train": TABLE}, lambda value: value)
    return WorkerDatasets(plan, 0, 1, 0, fetch=lambda value: value).get().get_split()


def pads(rows: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(row["ids"]) for row in rows)
    return {
        "ids": torch.tensor([[*row["ids"], *[0] * (longest - len(row["ids"]))] for row in rows]),
        "text": [row["text"] for row in rows],
    }


def test_collator_of_rows_gets_a_dict_for_each_row() -> None:
    first, second = shard().to_torch(2, collate_fn=pads)
    assert (first["ids"].tolist(), first["text"]) == ([[1, 0], [2, 3]], ["a", "b"])
    assert (second["ids"].tolist(), second["text"]) == ([[4, 5, 6]], ["c"])


@pytest.mark.parametrize("partial", [False, True])
def test_collator_of_torch_gets_rows_at_once(partial: bool) -> None:
    collate: Any = functools.partial(default_collate) if partial else default_collate
    first, _ = shard().to_torch(2, collate_fn=collate, columns=["pair", "label", "text"])
    assert first["pair"].tolist() == [[1, 2], [3, 4]] and first["pair"].dtype == torch.float32
    assert first["label"].tolist() == [2**60 + 1, 0] and first["text"] == ["a", "b"]


def test_collator_of_transformers_keeps_labels_whole_numbers() -> None:
    collate = pytest.importorskip("transformers").default_data_collator
    (batch,) = shard().to_torch(3, collate_fn=collate, columns=["pair", "label"])
    assert batch["labels"].tolist() == [2**60 + 1, 0, 1] and batch["labels"].dtype == torch.int64


def test_collator_of_columns_is_called_once_for_each_batch_and_keeps_its_errors() -> None:
    calls: list[Any] = []

    def collate(batch: dict[str, Any]) -> Any:
        calls.append(batch)
        if len(calls) == 2:
            raise KeyError("own")
        return {"x": batch["label"].copy()}

    batches = iter(shard().iter_batches(2, collate_fn=collate, prefetch=0))
    assert next(batches)["x"].tolist() == [2**60 + 1, 0]
    with pytest.raises(KeyError, match="own"):
        next(batches)
    assert len(calls) == 2 and isinstance(calls[0]["label"], np.ndarray)


def test_error_says_what_collate_fn_gets() -> None:
    def collate(batch: Any) -> Any:
        return batch["lable"]

    with pytest.raises(
        ConfigError, match=r"collate_fn collate of dataset 'train' raised KeyError: 'lable'. It gets"
    ) as e:
        list(shard().to_torch(2, collate_fn=collate, columns=["label", "text"]))
    assert "by column ('label', 'text'); one that takes a list of dicts" in str(e.value)
    assert isinstance(e.value.__cause__, KeyError)

    def other(batch: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(shard().to_torch(2, collate_fn=other))
