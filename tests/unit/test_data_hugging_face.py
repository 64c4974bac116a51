"""Hugging Face datasets: columns, selected rows, and transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.shard import DatasetShard
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError

datasets.disable_progress_bars()
ROWS = {"x": list(range(10)), "text": [f"row {n}" for n in range(10)], "pair": [[n, -n] for n in range(10)]}


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    """Return a dataset on disk, as `load_dataset` does."""
    datasets.Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "saved"))
    return datasets.load_from_disk(str(tmp_path / "saved"))


def shard(given: Any, name: str | None = None) -> DatasetShard:
    plan = resolve_datasets(given, _same)
    return WorkerDatasets(plan, 0, 1, 0, fetch=_same).get(name).get_split()


def _same(value: Any) -> Any:
    return value


def test_hugging_face_columns_are_read(dataset: Any) -> None:
    (batch,) = shard(dataset).iter_batches(10)
    assert batch["x"].tolist() == ROWS["x"] and batch["text"].tolist() == ROWS["text"]
    (tensors,) = shard(dataset).to_torch(10, columns=["x", "pair"])
    assert tensors["pair"].tolist() == ROWS["pair"]


def test_selected_shuffled_and_split_rows_are_read(dataset: Any) -> None:
    chosen = dataset.shuffle(seed=0).select(range(4))
    assert [row["x"] for row in shard(chosen).iter_rows()] == chosen["x"][:]
    parts = dataset.train_test_split(test_size=3, seed=1)
    found = [row["x"] for name in ("train", "test") for row in shard(parts, name).iter_rows()]
    assert sorted(found) == ROWS["x"]


def test_hugging_face_array_types_become_arrays() -> None:
    features = datasets.Features({"image": datasets.Array2D((2, 3), "float32"), "label": datasets.ClassLabel(2)})
    images = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    dataset = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]}, features)
    (batch,) = shard(dataset).to_torch(4)
    assert batch["image"].shape == (4, 2, 3) and batch["image"].tolist() == images.tolist()
    assert batch["label"].tolist() == [0, 1, 0, 1]


def test_dataset_with_a_transform_is_a_map_style_dataset(dataset: Any) -> None:
    doubled = dataset.with_transform(lambda rows: {"twice": [2 * x for x in rows["x"]]})
    assert [row["twice"] for row in shard(doubled).iter_rows()] == [2 * x for x in ROWS["x"]]


def test_images_are_decoded_on_the_worker() -> None:
    from PIL import Image

    images = [Image.new("RGB", (3, 2), (number, 0, 0)) for number in range(4)]
    features = datasets.Features({"image": datasets.Image()})
    dataset = datasets.Dataset.from_dict({"image": images}, features)
    assert [row["image"].size for row in shard(dataset).iter_rows()] == [(3, 2)] * 4


def test_columns_of_the_format_are_read(dataset: Any) -> None:
    (batch,) = shard(dataset.with_format("numpy", columns=["x"])).iter_batches(10)
    assert list(batch) == ["x"]


KINDS = ("int8", "uint8", "int32", "int64", "uint32", "float16", "float32", "float64", "bool")


def of_all_kinds() -> Any:
    rows: dict[str, Any] = {kind: np.arange(4).astype(kind) for kind in KINDS}
    rows |= {f"list of {kind}": np.arange(8).reshape(4, 2).astype(kind) for kind in KINDS}
    return datasets.Dataset.from_dict({**rows, "text": list("abcd")})


def dtypes(batch: Any) -> dict[str, str]:
    return {name: str(values.dtype) for name, values in batch.items() if hasattr(values, "dtype")}


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}, {"dtype": torch.float64}, {"dtype": torch.int32}])
def test_torch_format_keeps_its_dtypes(options: dict[str, Any]) -> None:
    dataset = of_all_kinds().with_format("torch", **options)
    numbers = [name for name in dataset.column_names if name != "text" and "bool" not in name]
    (batch,) = shard(dataset).to_torch(4, columns=numbers)
    expected = dtypes(dataset[:])
    assert dtypes(batch) == {name: expected[name] for name in numbers}
    assert batch["list of float64"].tolist() == dataset["list of float64"][:].tolist()
    assert [row["text"] for row in shard(dataset).iter_rows()] == list("abcd")


def test_numpy_format_keeps_its_dtypes() -> None:
    dataset = of_all_kinds().with_format("numpy")
    (batch,) = shard(dataset.remove_columns("text")).iter_batches(4)
    found = {name: values[0] if values.dtype == object else values for name, values in batch.items()}
    expected = dtypes(dataset.remove_columns("text")[:])
    assert dtypes(found) == expected and expected["bool"] == "bool"


def test_numbers_without_a_format_stay_as_they_are() -> None:
    (batch,) = shard(of_all_kinds()).iter_batches(4)
    assert {name: dtype for name, dtype in dtypes(batch).items() if name in KINDS} == {kind: kind for kind in KINDS}


def test_format_with_a_dtype_that_cannot_be_stored_is_refused() -> None:
    dataset = of_all_kinds().with_format("torch", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"dtype=torch\.bfloat16\), which cannot be stored; leave it out and convert"):
        resolve_datasets(dataset, _same)


def test_iterable_dataset_is_refused() -> None:
    stream = datasets.Dataset.from_dict(ROWS).to_iterable_dataset()
    with pytest.raises(ConfigError, match="which cannot be split among workers"):
        resolve_datasets(stream, _same)
