"""`label_column` and `feature_columns`: batches as ``(features, label)``, from every kind of dataset with columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import raysgd
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.plan import UNNAMED, DatasetPlan, Source
from raysgd.data.shard import DatasetShard
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.data.streams.stream import InlineStream, ProducedBlock
from raysgd.errors import ConfigError

ROWS = 6
COLUMNS = {
    "area": np.arange(ROWS, dtype=np.float64),
    "rooms": np.arange(ROWS, dtype=np.int64) * 10,
    "y": np.arange(ROWS, dtype=np.int64) % 2,
}
FEATURES = [[0, 0], [1, 10], [2, 20], [3, 30], [4, 40], [5, 50]]


def shards(dataset: Any, world_size: int = 1) -> list[DatasetShard]:
    plan = resolve_datasets(dataset, lambda value: value)
    contexts = [WorkerDatasets(plan, rank, world_size, 0, fetch=lambda value: value) for rank in range(world_size)]
    return [context.get().get_split() for context in contexts]


def shard(dataset: Any = COLUMNS) -> DatasetShard:
    return shards(dataset)[0]


def parquet(folder: Path) -> Path:
    pq.write_table(pa.table(COLUMNS), folder / "rows.parquet", row_group_size=2)
    return folder


@pytest.mark.parametrize("kind", ["arrays", "table", "frame", "rows", "files"])
def test_loop_gets_features_and_label(kind: str, tmp_path: Path) -> None:
    dataset = {
        "arrays": lambda: COLUMNS,
        "table": lambda: pa.table(COLUMNS),
        "frame": lambda: pa.table(COLUMNS).to_pandas(),
        "rows": lambda: pa.table(COLUMNS).to_pylist(),
        "files": lambda: parquet(tmp_path),
    }[kind]()
    features, labels = [], []
    for x, y in shard(dataset).to_torch(4, label_column="y"):
        assert x.dtype == torch.float64 and y.dtype == torch.int64
        features += x.tolist()
        labels += y.tolist()
    assert features == FEATURES
    assert labels == COLUMNS["y"].tolist()


def test_features_of_a_lazy_dataset() -> None:
    table = pa.table(COLUMNS)
    blocks = [ProducedBlock(table.slice(i, 3), 3, 72, tuple(COLUMNS), table.schema) for i in (0, 3)]
    stream = InlineStream(lambda: iter(blocks), fetch=lambda ref: ref)
    plan = DatasetPlan({UNNAMED: Source("stream", (stream,), ())})
    lazy = WorkerDatasets(plan, 0, 1, 0, fetch=lambda value: value).get().get_split()
    pairs = list(lazy.to_torch(4, label_column="y"))
    assert [row for x, _ in pairs for row in x.tolist()] == FEATURES
    with pytest.raises(ConfigError, match="has no column 'label'; it has 'area', 'rooms', 'y'"):
        lazy.to_torch(label_column="label")


def test_features_are_stacked_in_the_given_order_with_a_common_type() -> None:
    (x, y), *_ = shard().to_torch(2, label_column="y", feature_columns=["rooms", "area"])
    assert x.tolist() == [[0, 0], [10, 1]]
    assert x.dtype == torch.float64 and x.shape == (2, 2) and y.tolist() == [0, 1]


def test_single_feature_column_is_taken_as_it_is() -> None:
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    ((x, y),) = shard({"image": images, "y": np.array([1, 0])}).to_torch(2, label_column="y")
    assert x.shape == (2, 3, 4) and y.tolist() == [1, 0]
    (x, _), *_ = shard().to_torch(2, label_column="y", feature_columns=["rooms"])
    assert x.tolist() == [0, 10] and x.dtype == torch.int64


def test_types_apply_to_all_columns_or_by_column() -> None:
    (x, y), *_ = shard().to_torch(2, label_column="y", dtypes=torch.float32)
    assert (x.dtype, y.dtype) == (torch.float32, torch.float32)
    (x, y), *_ = shard().to_torch(
        2, label_column="y", dtypes={"area": torch.float32, "rooms": torch.float32, "y": torch.int32}
    )
    assert (x.dtype, y.dtype) == (torch.float32, torch.int32)


def test_rank_without_rows_gets_empty_features_and_label() -> None:
    first, second = shards({name: values[:1] for name, values in COLUMNS.items()}, 2)
    ((x, y),) = second.to_torch(4, label_column="y")
    assert x.shape == (0, 2) and y.shape == (0,) and x.dtype == torch.float64
    ((x, y),) = first.to_torch(4, label_column="y")
    assert x.shape == (1, 2)


def test_first_batch_is_a_pair_and_consumes_nothing() -> None:
    batches = shard().to_torch(2, label_column="y")
    x, y = batches.first_batch()
    assert x.shape == (2, 2) and y.shape == (2,)
    assert batches.epoch == 0 and len(list(batches)) == 3


def test_pairs_without_a_trainer() -> None:
    with raysgd.local(dataset=COLUMNS):
        (x, y), *_ = raysgd.get_dataset().get_split().to_torch(label_column="y")
    assert x.tolist() == FEATURES and len(y) == ROWS


def test_selected_columns_of_a_hugging_face_dataset() -> None:
    hugging_face = pytest.importorskip("datasets")
    dataset = hugging_face.Dataset.from_dict({name: values.tolist() for name, values in COLUMNS.items()})
    ((x, y),) = shard(dataset.with_format("torch", columns=["rooms", "y"])).to_torch(label_column="y")
    assert x.tolist() == COLUMNS["rooms"].tolist() and y.tolist() == COLUMNS["y"].tolist()


@pytest.mark.jax
def test_jax_features_and_label() -> None:
    pytest.importorskip("jax")
    columns = {name: values.astype(np.int32) for name, values in COLUMNS.items()}
    (x, y), *_ = shard(columns).to_jax(2, label_column="y", feature_columns=["rooms", "area"])
    assert x.tolist() == [[0, 0], [10, 1]] and y.tolist() == [0, 1]
    wide = {**columns, "y": np.full(ROWS, 2**40)}
    with pytest.raises(ConfigError, match="column 'y' of dataset 'dataset' holds integers out of the range"):
        next(iter(shard(wide).to_jax(2, label_column="y")))


@pytest.mark.tensorflow
def test_tensorflow_features_and_label() -> None:
    pytest.importorskip("tensorflow")
    (x, y), *_ = shard().to_tf(2, label_column="y")
    assert x.numpy().tolist() == FEATURES[:2] and y.numpy().tolist() == [0, 1]
    texts = {**COLUMNS, "name": np.array(["a"] * ROWS)}
    with pytest.raises(ConfigError, match="column 'name' of dataset 'dataset' holds strings and cannot be stacked"):
        shard(texts).to_tf(2, label_column="y")


def test_default_batch_size_is_32_rows_per_worker() -> None:
    first, second = shards({"x": np.arange(100)}, 2)
    assert [len(batch["x"]) for batch in first.to_torch()] == [32, 32]
    assert [len(batch["x"]) for batch in second.iter_batches()] == [32, 4]
    assert [len(batch["x"]) for batch in shard({"x": np.arange(40)}).to_torch(global_batch_size=20)] == [20, 20]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"feature_columns": ["area"]}, r"feature_columns=\.\.\.\) needs label_column"),
    ({"label_column": "y", "columns": ["area"]}, r"columns=\.\.\., label_column=\.\.\.\) exclude each other"),
    ({"label_column": "y", "collate_fn": dict}, r"label_column=\.\.\., collate_fn=\.\.\.\) exclude each other"),
    ({"label_column": "label"}, "label_column: dataset 'dataset' has no column 'label'; it has 'area', 'rooms', 'y'"),
    ({"label_column": "y", "feature_columns": ["aera"]}, r"no column 'aera' \(did you mean 'area'\?\)"),
    ({"label_column": "y", "feature_columns": "area"}, "is one string; give a list"),
    ({"label_column": "y", "feature_columns": []}, "has no feature column"),
    ({"label_column": "y", "feature_columns": ["area", "y"]}, "is also in feature_columns"),
    ({"label_column": "y", "feature_columns": ["area", "area"]}, "has a column twice"),
    ({"label_column": ["y"]}, "is not the name of a column"),
    ({"label_column": "y", "feature_columns": ["area"], "dtypes": {"rooms": torch.float32}}, "no column 'rooms'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_arguments_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard().to_torch(2, **options)


def test_map_style_dataset_has_no_label_column() -> None:
    with pytest.raises(ConfigError, match=r"to_torch\(label_column=\.\.\.\).*a map-style dataset, have no columns"):
        shard([(1.0, 2.0), (3.0, 4.0)]).to_torch(label_column="y")


def test_feature_columns_with_axes_of_their_own_are_not_stacked() -> None:
    dataset = {**COLUMNS, "image": np.zeros((ROWS, 3))}
    with pytest.raises(
        ConfigError, match=r"column 'image' of dataset 'dataset' holds rows of shape \(3,\) and cannot be"
    ):
        next(iter(shard(dataset).to_torch(label_column="y")))


def test_text_features_are_refused_with_their_column() -> None:
    dataset = pa.table({**COLUMNS, "name": ["a"] * ROWS})
    with pytest.raises(ConfigError, match=r"column 'name' of dataset 'dataset' holds strings.*feature_columns"):
        next(iter(shard(dataset).to_torch(label_column="y")))
