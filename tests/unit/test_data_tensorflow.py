"""`to_tf`: batches in a `tf.data.Dataset`, and the position while TensorFlow reads them."""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.shard import DatasetShard
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError
from support.items import Listed, aligned_buffer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow


def contexts(dataset: Any, world_size: int = 1, positions: Any = None) -> list[WorkerDatasets]:
    plan = resolve_datasets({"train": dataset}, lambda value: value)
    same = {"seed": 0, "positions": positions, "fetch": lambda value: value}
    return [WorkerDatasets(plan, rank, world_size, **same) for rank in range(world_size)]


def shards(dataset: Any, world_size: int = 1) -> list[DatasetShard]:
    return [context.get().get_split() for context in contexts(dataset, world_size)]


def numbers(num_rows: int = 10) -> dict[str, Any]:
    return {"x": np.arange(num_rows, dtype=np.float32)}


def consumed(context: WorkerDatasets) -> tuple[int, int]:
    position = context.positions()["train"]
    return position["epoch"], position["consumed"]


def test_columns_are_tensors_of_all_rows_and_each_iteration_is_an_epoch() -> None:
    (shard,) = shards(pa.table({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "s": ["a", "ü", "c"], "y": [1, 2, 3]}))
    dataset = shard.to_tf(2)
    assert isinstance(dataset, tf.data.Dataset)
    assert dataset.element_spec == {
        "x": tf.TensorSpec((None, 2), tf.float64),
        "s": tf.TensorSpec((None,), tf.string),
        "y": tf.TensorSpec((None,), tf.int64),
    }
    for epoch in range(2):
        assert shard.epoch == epoch
        first, second = dataset
        assert first["x"].numpy().tolist() == [[1, 2], [3, 4]] and second["y"].numpy().tolist() == [3]
        assert [text.decode() for text in first["s"].numpy()] == ["a", "ü"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_buffer_that_collate_fn_reuses_is_copied(prefetch: int) -> None:
    (shard,) = shards(numbers(64))
    buffer = aligned_buffer(16)

    def collate(batch: dict[str, Any]) -> Any:
        buffer[:] = batch["x"]
        return {"x": buffer}

    firsts = list(shard.to_tf(16, collate_fn=collate, prefetch=prefetch))
    assert [int(batch["x"][0]) for batch in firsts] == [0, 16, 32, 48]


def test_position_follows_the_loop_and_leaving_it_ends_the_epoch() -> None:
    (context,) = contexts(numbers())
    dataset = context.get().get_split().to_tf(2).map(lambda batch: batch["x"] * 2)
    seen = []
    for step, batch in enumerate(dataset, 1):
        seen.append(batch.numpy().tolist())
        assert consumed(context) == (0, 2 * step)
        if step == 3:
            break
    assert seen == [[0, 2], [4, 6], [8, 10]]
    assert consumed(context) == (1, 0)
    assert len(list(dataset)) == 5 and consumed(context) == (2, 0)


def test_tf_dataset_resumes_inside_an_epoch() -> None:
    (before,) = contexts(numbers())
    for batch in before.get().get_split().to_tf(2):
        if batch["x"].numpy()[0] == 4:
            break
        positions = before.positions()
    (after,) = contexts(numbers(), positions=positions)
    assert [batch["x"].numpy().tolist() for batch in after.get().get_split().to_tf(2)] == [[4, 5], [6, 7], [8, 9]]


def test_rank_without_rows_gets_empty_tensors() -> None:
    batches = [[batch["x"].numpy().tolist() for batch in shard.to_tf(4)] for shard in shards(numbers(), 2)]
    assert batches == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], []]]
    assert [len(list(shard.to_tf(4, drop_last=True))) for shard in shards(numbers(), 2)] == [1, 1]


def test_keras_fits_pairs_of_collate_fn() -> None:
    (context,) = contexts({"x": np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)})
    pairs = (
        context.get()
        .get_split()
        .to_tf(16, collate_fn=lambda batch: [batch["x"], batch["x"].sum(axis=1, keepdims=True)], shuffle="full")
    )
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(pairs, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.01 * losses[0]
    assert consumed(context) == (20, 0)


def test_dtypes_for_all_columns_or_by_column() -> None:
    (shard,) = shards({"x": np.arange(4.0), "y": np.arange(4)})
    assert shard.to_tf(4, dtypes=tf.float16).element_spec["x"].dtype == tf.float16
    spec = shard.to_tf(4, dtypes={"y": tf.uint8}).element_spec
    assert (spec["x"].dtype, spec["y"].dtype) == (tf.float64, tf.uint8)
    with pytest.raises(ConfigError, match=r"no column 'z'"):
        shard.to_tf(4, dtypes={"z": tf.uint8})
    for given in ("foo", tf.string):
        with pytest.raises(ConfigError, match="is not a type of numbers"):
            shard.to_tf(4, dtypes=given)
    with pytest.raises(ConfigError, match="give at least one column"):
        shard.to_tf(4, columns=[])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([dt.datetime(2020, 1, 1)], r"holds datetime64\[us\], for which TensorFlow has no type"),
        ([{"a": 1}], "holds dict objects, for which TensorFlow has no type"),
        (["a", None], "has nulls among its strings"),
        ([None, None], "holds NoneType objects"),
        ([[[1], [2, 3]], [[4], [5]]], "is ragged: lists within a row have different lengths"),
        ([[1], [2, 3]], "is ragged"),
    ],
)
def test_unsupported_tensorflow_type_is_refused_with_its_column(values: list[Any], message: str) -> None:
    (shard,) = shards(pa.table({"c": values}))
    with pytest.raises(ConfigError, match=f"column 'c' of dataset 'train' {message}"):
        shard.to_tf(2)


@pytest.mark.parametrize(
    ("items", "collate_fn", "message"),
    [
        ([1, 2, 3.5, 4], None, "item of dataset 'train' holds float64 of shape"),
        ([0, 1, 2, 3], lambda items: np.array(items) / (1 if items[0] == 0 else 2), None),
        ([0, 1, 2, 3], lambda items: np.array(items, np.int32 if items[0] == 0 else np.int64), "holds int64 of shape"),
        ([0, 1, 2, 3], lambda items: np.zeros((2, 1 + items[0])), r"holds float64 of shape \(2, 3\)"),
        ([0, 1, 2, 3], lambda items: {"a": 1} if items[0] == 0 else {"b": 1}, "holds a dict"),
        ([0, 1, 2, 3], lambda items: {"n": items[0] * 2**40, "x": np.zeros(2)}, None),
    ],
)
def test_batch_of_another_type_is_refused_and_not_consumed(items: list[Any], collate_fn: Any, message: Any) -> None:
    (context,) = contexts(Listed(items))
    batches = context.get().get_split().to_tf(2, collate_fn=collate_fn)
    if message is None:
        assert len(list(batches)) == 2
        return
    with pytest.raises(tf.errors.OpError, match=message):
        list(batches)
    assert consumed(context) == (0, 2)


def test_python_numbers_keep_64_bits_and_lists_of_them_become_arrays() -> None:
    (shard,) = shards(Listed([0, 1, 2]))

    def collate(items: list[int]) -> Any:
        return {"n": items[0] * 2**40, "labels": [float(item) for item in items], "s": [str(item) for item in items]}

    first, second = shard.to_tf(2, collate_fn=collate)
    assert second["n"].numpy() == 2 * 2**40
    assert (first["labels"].numpy().tolist(), second["labels"].numpy().tolist()) == ([0, 1], [2])
    assert second["s"].numpy().tolist() == [b"2"]


def test_collate_fn_may_return_ragged_and_sparse_tensors() -> None:
    column = pa.table({"c": [[1], [2, 3], [4, 5, 6]]})
    batches = [
        list(shard.to_tf(2, collate_fn=lambda batch: tf.ragged.constant([list(row) for row in batch["c"]])))
        for shard in shards(column, 2)
    ]
    assert [[batch.to_list() for batch in of_rank] for of_rank in batches] == [[[[1], [2, 3]]], [[[4, 5, 6]]]]
    first, second = shards(numbers(2), 2)
    assert len(list(first.to_tf(2, collate_fn=lambda batch: tf.sparse.from_dense(batch["x"])))) == 1
    with pytest.raises(ConfigError, match=r"this rank has no rows.*cannot make an empty batch"):
        second.to_tf(2, collate_fn=lambda batch: tf.sparse.from_dense(batch["x"]))


def test_reading_the_signature_restores_random_generators() -> None:
    def collate(batch: dict[str, Any]) -> Any:
        return batch["x"] + np.random.random(len(batch["x"])).astype(np.float32)

    drawn = []
    for signature in (None, tf.TensorSpec((None,), tf.float32)):
        np.random.seed(3)
        (shard,) = shards(numbers())
        drawn.append(
            [batch.numpy().tolist() for batch in shard.to_tf(4, collate_fn=collate, output_signature=signature)]
        )
    assert drawn[0] == drawn[1]


def test_strings_keep_trailing_zeros() -> None:
    (shard,) = shards(pa.table({"c": [[b"ab\0\0", b"cdef"], [b"", b"x"]]}))
    assert shard.to_tf(2).get_single_element()["c"].numpy().tolist() == [[b"ab\0\0", b"cdef"], [b"", b"x"]]


def test_batches_of_varying_shapes_need_a_signature() -> None:
    (shard,) = shards(pa.table({"c": [[1], [2, 3], [4, 5, 6]]}))

    def padded(batch: dict[str, Any]) -> Any:
        rows = batch["c"]
        whole = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for row, values in zip(whole, rows, strict=True):
            row[: len(values)] = values
        return whole

    dataset = shard.to_tf(2, collate_fn=padded, output_signature=tf.TensorSpec((None, None), tf.int64))
    assert [batch.numpy().tolist() for batch in dataset] == [[[1, 0], [2, 3]], [[4, 5, 6]]]


def test_signature_of_an_empty_dataset_is_refused() -> None:
    (shard,) = shards(numbers(0))
    with pytest.raises(ConfigError, match="has no rows, so it has no first batch"):
        shard.to_tf(2)


def test_error_while_reading_is_in_tensorflows_error() -> None:
    def collate(batch: dict[str, Any]) -> Any:
        if batch["x"][0] == 4:
            raise ValueError("row 4 is broken")
        return batch["x"]

    (context,) = contexts(numbers())
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 4 is broken"):
        list(context.get().get_split().to_tf(2, collate_fn=collate))
    assert consumed(context) == (0, 4)


def test_items_of_a_map_style_dataset_are_stacked() -> None:
    (shard,) = shards([(np.full(2, row), f"row {row}") for row in range(3)])
    ((numbers, names),) = shard.to_tf(3)
    assert numbers.numpy().tolist() == [[0, 0], [1, 1], [2, 2]]
    assert names.numpy().tolist() == [b"row 0", b"row 1", b"row 2"]
