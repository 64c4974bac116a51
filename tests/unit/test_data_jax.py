"""`to_jax`: the arrays that a loop gets, and the values that are refused."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.shard import DatasetShard
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError
from support.items import Listed, aligned_buffer

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax


def shards(dataset: Any, world_size: int = 1) -> list[DatasetShard]:
    plan = resolve_datasets({"train": dataset}, lambda value: value)
    same = {"seed": 0, "positions": None, "fetch": lambda value: value}
    return [WorkerDatasets(plan, rank, world_size, **same).get().get_split() for rank in range(world_size)]


class Squares:
    """A map-style dataset."""

    def __init__(self, *, is_ragged: bool = False) -> None:
        self._is_ragged = is_ragged

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full(index if self._is_ragged else 2, index), "y": (index**2, f"row {index}")}


def test_columns_are_jax_arrays_of_all_rows() -> None:
    given = {"x": np.arange(10, dtype=np.float32).reshape(5, 2), "y": np.arange(5), "is_odd": np.arange(5) % 2 == 1}
    (shard,) = shards(given)
    batches = list(shard.to_jax(2))
    assert all(isinstance(array, jax.Array) for batch in batches for array in batch.values())
    assert {name: str(array.dtype) for name, array in batches[0].items()} == {
        "x": "float32",
        "y": "int32",
        "is_odd": "bool",
    }
    for name, values in given.items():
        assert np.concatenate([batch[name] for batch in batches]).tolist() == values.tolist()
    assert shard.epoch == 1


def test_rank_without_rows_gets_empty_arrays_of_the_usual_shapes() -> None:
    first, second = shards(pa.table({"x": [[1.0, 2.0]] * 3}), 2)
    (whole,), (empty,) = first.to_jax(4), second.to_jax(4)
    assert (whole["x"].shape, empty["x"].shape, empty["x"].dtype) == ((3, 2), (0, 2), whole["x"].dtype)
    gradient = jax.grad(lambda w: ((empty["x"] @ w) ** 2).sum())(np.ones(2, np.float32))
    assert gradient.tolist() == [0, 0]


def test_dtypes_for_all_columns_or_by_column() -> None:
    (shard,) = shards({"x": np.arange(4.0), "y": np.arange(4)})
    assert {str(array.dtype) for array in shard.to_jax(4, dtypes=jax.numpy.bfloat16).first_batch().values()} == {
        "bfloat16"
    }
    batch = shard.to_jax(4, dtypes={"y": np.uint8}, columns=["y"]).first_batch()
    assert {name: str(array.dtype) for name, array in batch.items()} == {"y": "uint8"}
    with pytest.raises(ConfigError, match=r"no column 'z'"):
        shard.to_jax(4, dtypes={"z": np.uint8})
    with pytest.raises(ConfigError, match="collate_fn makes the batch"):
        shard.to_jax(4, dtypes=np.uint8, collate_fn=dict)


def test_integers_beyond_32_bits_are_refused_unless_x64_is_enabled() -> None:
    (shard,) = shards({"id": np.array([1, 2**40])})
    batches = shard.to_jax(2)
    with pytest.raises(
        ConfigError, match=r"column 'id' of dataset 'train' holds integers out of the range of int32.*jax_enable_x64"
    ):
        batches.first_batch()
    with jax.enable_x64(True):
        assert batches.first_batch()["id"].tolist() == [1, 2**40]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_jax_settings_of_the_loop_apply_to_prefetched_batches(prefetch: int) -> None:
    (shard,) = shards({"id": np.array([1, 2**40]), "x": np.array([0.1, 0.2])})
    with jax.enable_x64(True):
        (batch,) = shard.to_jax(2, collate_fn=dict, prefetch=prefetch)
    assert batch["id"].tolist() == [1, 2**40] and str(batch["x"].dtype) == "float64"


def test_integers_out_of_range_of_the_dtype_are_refused() -> None:
    (shard,) = shards({"id": np.array([1, 300])})
    with pytest.raises(
        ConfigError, match=r"column 'id' of dataset 'train' holds integers out of the range of uint8.*give a wider type"
    ):
        shard.to_jax(2, dtypes=np.uint8).first_batch()
    (names,) = shards({"name": np.array(["a", "b"])})
    with pytest.raises(
        ConfigError, match="column 'name' of dataset 'train' holds strings, which cannot be converted to float32"
    ):
        names.to_jax(2, dtypes=np.float32).first_batch()
    with pytest.raises(ConfigError, match="dtypes='foo'"):
        shard.to_jax(2, dtypes="foo")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_buffer_that_collate_fn_reuses_is_copied(prefetch: int) -> None:
    (shard,) = shards({"x": np.arange(64)})
    buffer = aligned_buffer(16)

    def collate(batch: dict[str, Any]) -> Any:
        buffer[:] = batch["x"]
        return {"inside": [buffer]}

    firsts = list(shard.to_jax(16, collate_fn=collate, prefetch=prefetch))
    assert [int(batch["inside"][0][0]) for batch in firsts] == [0, 16, 32, 48]


class Encoding(dict[str, Any]):
    """A container with a method ``to``, as tokenizers return it."""

    def to(self, device: Any) -> Encoding:
        raise AssertionError("this is for torch")


def test_arrays_inside_containers_with_a_to_method_are_converted() -> None:
    (shard,) = shards({"x": np.arange(2.0)})
    batch = shard.to_jax(2, collate_fn=Encoding).first_batch()
    assert isinstance(batch["x"], jax.Array)


@pytest.mark.parametrize(
    ("values", "held"),
    [
        (["a", "b"], "strings"),
        ([dt.datetime(2020, 1, 1)], r"datetime64\[us\]"),
        ([{"a": 1}], "dict objects"),
        ([None, "a"], "strings"),
        ([None, None], "NoneType objects"),
    ],
)
def test_unsupported_jax_type_is_refused_with_its_column(values: list[Any], held: str) -> None:
    (shard,) = shards(pa.table({"c": values}))
    with pytest.raises(ConfigError, match=f"column 'c' of dataset 'train' holds {held}, for which JAX has no type"):
        shard.to_jax(2).first_batch()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_arrays_that_collate_fn_returns_become_jax_arrays(prefetch: int) -> None:
    first, second = shards({"x": np.arange(3), "name": np.array(["a", "b", "c"], object)}, 2)

    def collate(batch: dict[str, Any]) -> Any:
        return {"twice": 2 * batch["x"], "names": batch["name"].tolist()}

    for shard, numbers, names in ((first, [0, 2], ["a", "b"]), (second, [4], ["c"])):
        (batch,) = shard.to_jax(2, collate_fn=collate, prefetch=prefetch)
        assert isinstance(batch["twice"], jax.Array) and batch["twice"].tolist() == numbers
        assert batch["names"] == names


def test_items_of_a_map_style_dataset_are_stacked() -> None:
    (shard,) = shards(Squares())
    batch = shard.to_jax(3, collate_fn=lambda items: [item["y"][0] for item in items]).first_batch()
    assert batch == [0, 1, 4]
    with pytest.raises(ConfigError, match=r"item\['y'\]\[1\] of dataset 'train' holds strings.*in collate_fn"):
        shard.to_jax(3).first_batch()
    (numbers,) = shards([(np.full(2, row), row**2) for row in range(3)])
    pair = numbers.to_jax(3).first_batch()
    assert isinstance(pair, tuple) and [part.tolist() for part in pair] == [[[0, 0], [1, 1], [2, 2]], [0, 1, 4]]
    (ragged,) = shards(Squares(is_ragged=True))
    with pytest.raises(ConfigError, match=r"the rows of dataset 'train' cannot be stacked.*Give collate_fn"):
        ragged.to_jax(3).first_batch()


def test_batches_are_put_on_a_device_or_a_sharding() -> None:
    (shard,) = shards({"x": np.arange(4.0)})
    device = jax.devices()[0]
    assert shard.to_jax(4, device=device).first_batch()["x"].devices() == {device}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert shard.to_jax(4, device=sharding).first_batch()["x"].sharding == sharding


SHARDED = """
import jax, numpy as np
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError

plan = resolve_datasets({"x": np.arange(18.0)}, lambda value: value)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
for rank, expected in ((0, [8, "short"]), (1, [8, 0])):
    shard = WorkerDatasets(plan, rank, 2, 0, None, fetch=lambda value: value).get().get_split()
    sizes = []
    try:
        for batch in shard.to_jax(8, device=sharding):
            sizes.append(len(batch["x"]))
    except ConfigError as error:
        assert "of shape (2,), cannot be put on" in str(error) and "drop_last=True" in str(error), error
        sizes.append("short")
    assert sizes == expected, (rank, sizes)
"""


def test_batch_that_does_not_fit_a_sharding_is_refused_unless_it_is_empty() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([1, 2**63 + 1], "values of int64 and uint64 in one place"),
        ([1, "a"], "strings and other values in one place"),
        ([True, 2], "values of bool and int64 in one place"),
        ([[1], [2, 3]], "lists of different lengths"),
    ],
)
def test_items_whose_values_numpy_would_change_are_refused(items: list[Any], message: str) -> None:
    (shard,) = shards(Listed(items))
    with pytest.raises(ConfigError, match=f"the rows of dataset 'train' cannot be stacked: {message}"):
        shard.to_jax(2).first_batch()
