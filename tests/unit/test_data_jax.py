"""`to_jax`: what arrays a loop gets, and what is refused."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raysgd.data import DataContext, Shard, resolve_datasets
from raysgd.errors import ConfigError

jax = pytest.importorskip("jax")


def shards(dataset: Any, world_size: int = 1) -> list[Shard]:
    plan = resolve_datasets({"train": dataset}, lambda value: value)
    same = {"seed": 0, "positions": None, "fetch": lambda value: value}
    return [DataContext(plan, rank, world_size, **same).get().get_split() for rank in range(world_size)]


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


def test_a_rank_without_rows_gets_arrays_of_none_with_the_shapes_of_the_others() -> None:
    first, second = shards(pa.table({"x": [[1.0, 2.0]] * 3}), 2)
    (whole,), (empty,) = first.to_jax(4), second.to_jax(4)
    assert (whole["x"].shape, empty["x"].shape, empty["x"].dtype) == ((3, 2), (0, 2), whole["x"].dtype)
    gradient = jax.grad(lambda w: ((empty["x"] @ w) ** 2).sum())(np.ones(2, np.float32))
    assert gradient.tolist() == [0, 0]


def test_types_are_chosen_for_all_or_by_column() -> None:
    (shard,) = shards({"x": np.arange(4.0), "y": np.arange(4)})
    assert {str(array.dtype) for array in shard.to_jax(4, dtypes=jax.numpy.bfloat16).first_batch().values()} == {
        "bfloat16"
    }
    batch = shard.to_jax(4, dtypes={"y": np.uint8}, columns=["y"]).first_batch()
    assert {name: str(array.dtype) for name, array in batch.items()} == {"y": "uint8"}
    with pytest.raises(ConfigError, match=r"no column 'z'"):
        shard.to_jax(4, dtypes={"z": np.uint8})
    with pytest.raises(ConfigError, match="the batch is made by collate_fn"):
        shard.to_jax(4, dtypes=np.uint8, collate_fn=dict)


def test_integers_that_jax_would_cut_off_are_refused_and_kept_where_it_has_64_bits() -> None:
    (shard,) = shards({"id": np.array([1, 2**40])})
    batches = shard.to_jax(2)
    with pytest.raises(
        ConfigError, match=r"column 'id' of dataset 'train' holds integers beyond 32 bits.*jax_enable_x64"
    ):
        batches.first_batch()
    with jax.enable_x64(True):
        assert batches.first_batch()["id"].tolist() == [1, 2**40]


@pytest.mark.parametrize(
    ("values", "held"),
    [
        (["a", "b"], "strings"),
        ([dt.datetime(2020, 1, 1)], r"datetime64\[us\]"),
        ([{"a": 1}], "dict objects"),
    ],
)
def test_what_jax_has_no_type_for_is_named(values: list[Any], held: str) -> None:
    (shard,) = shards(pa.table({"c": values}))
    with pytest.raises(ConfigError, match=f"column 'c' of dataset 'train' holds {held}, which JAX has no type for"):
        shard.to_jax(2).first_batch()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_collate_fn_makes_the_batch_and_its_arrays_become_jax_arrays(prefetch: int) -> None:
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
    with pytest.raises(ConfigError, match="holds strings, which JAX has no type for"):
        shard.to_jax(3).first_batch()
    (numbers,) = shards([(np.full(2, row), row**2) for row in range(3)])
    pair = numbers.to_jax(3).first_batch()
    assert isinstance(pair, tuple) and [part.tolist() for part in pair] == [[[0, 0], [1, 1], [2, 2]], [0, 1, 4]]
    (ragged,) = shards(Squares(is_ragged=True))
    with pytest.raises(ConfigError, match=r"the rows of dataset 'train' do not make a batch.*Give collate_fn"):
        ragged.to_jax(3).first_batch()


def test_batches_are_put_on_a_device_or_a_sharding() -> None:
    (shard,) = shards({"x": np.arange(4.0)})
    device = jax.devices()[0]
    assert shard.to_jax(4, device=device).first_batch()["x"].devices() == {device}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert shard.to_jax(4, device=sharding).first_batch()["x"].sharding == sharding
