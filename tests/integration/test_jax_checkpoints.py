"""Checkpoints of arrays that are distributed over workers: each saves its shards, and other meshes restore them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import raysgd
from raysgd.errors import CheckpointError, ReshardError
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)
pytestmark = [pytest.mark.timeout(180), pytest.mark.shared_trainer]
TRAINER = {"backend": raysgd.JaxConfig(devices_per_worker=2)}
ROWS, COLUMNS = 48, 24
#: The specs of the arrays below, on the mesh that saves and on those that restore.
SAVED = {
    "axes": [("data", -1), ("model", 2)],
    "w": ("data", "model"),
    "h": (None, "data"),
    "f": (("data", "model"),),
    "b": (),
}
BY_ROWS = {"axes": [("data", -1)], "w": ("data",), "h": ("data",), "f": ("data",), "b": ("data",)}
BY_COLUMNS = {"axes": [("data", -1)], "w": (None, "data"), "h": (), "f": (), "b": ()}
TURNED = {"axes": [("model", 2), ("data", -1)], "w": ("model", "data"), "h": ("data", "model"), "f": ("data",), "b": ()}


class Moments(NamedTuple):
    """Moments of an optimizer, in the type that optimizers use."""

    mu: Any
    nu: Any


def numbers() -> dict[str, Any]:
    """Return the values of the arrays."""
    import ml_dtypes

    w = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return {"w": w, "h": w.astype(ml_dtypes.bfloat16), "f": w.astype(ml_dtypes.float8_e4m3), "b": w[:, 0].copy()}


def make_state(where: dict[str, Any], values: dict[str, Any], step: int) -> dict[str, Any]:
    """Return a state with the values on a mesh of all devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = raysgd.jax.mesh(*where["axes"])

    def put(name: str) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*where[name]))
        return jax.make_array_from_callback(values[name].shape, sharding, lambda index: values[name][index])

    total = jax.jit(lambda x: x.sum() * 0 + step)(put("b"))  # a scalar that is replicated on all processes
    return {
        "params": [put("w"), {"half": put("h")}],
        "moments": Moments(put("f"), None),
        "b": put("b"),
        "step": step,
        "total": total,
    }


def saves(config: dict[str, Any]) -> None:
    raysgd.save_checkpoint(make_state(config["where"], numbers(), 3), all_ranks=True)


def restores(config: dict[str, Any]) -> dict[str, Any]:
    """Whether each shard of each array has the saved bits and the requested spec."""
    import jax

    values = numbers()
    like = make_state(config["where"], {name: np.zeros_like(value) for name, value in values.items()}, 0)
    if config.get("by_shardings"):
        like = jax.tree.map(lambda leaf: getattr(leaf, "sharding", leaf), like)
    saved = raysgd.load_checkpoint()
    state = raysgd.jax.restore(saved, like=like)
    found = {"w": state["params"][0], "h": state["params"][1]["half"], "f": state["moments"].mu, "b": state["b"]}
    for name, array in found.items():
        assert array.dtype == values[name].dtype
        assert array.sharding.spec == jax.sharding.PartitionSpec(*config["where"][name])
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[name][shard.index].tobytes(), (name, shard)
    assert type(state["moments"]) is Moments and state["moments"].nu is None
    return {"saved": repr(saved["params"][0]), "step": state["step"], "total": float(state["total"])}


@pytest.fixture(scope="module")
def checkpoint(trainer: raysgd.Trainer) -> raysgd.Checkpoint:
    """Save a checkpoint with two workers that have two devices each."""
    trainer.run(saves, {"where": SAVED}, callbacks=quiet())
    found = trainer.get_last_checkpoint()
    assert found is not None
    return found


def test_each_distinct_shard_is_written_once(checkpoint: raysgd.Checkpoint) -> None:
    sizes, owners = [], []
    for rank in (0, 1):
        head = Path(str(checkpoint.path), f"a0001-r{rank:05d}.safetensors").read_bytes()
        header = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        sizes += [end - begin for begin, end in offsets]
        owners.append(len(offsets))
    assert sum(sizes) == sum(value.nbytes for value in numbers().values()) + 4
    assert len(sizes) == 4 + 2 + 4 + 1 + 1 and min(owners) >= 4  # w and f in four shards, h in two


def test_driver_gets_whole_arrays(checkpoint: raysgd.Checkpoint) -> None:
    state, values = checkpoint.load(), numbers()
    loaded = {"w": state["params"][0], "h": state["params"][1]["half"], "f": state["moments"].mu, "b": state["b"]}
    for name, array in loaded.items():
        assert type(array) is np.ndarray and array.flags.writeable
        assert (array.dtype, array.tobytes()) == (values[name].dtype, values[name].tobytes())
    assert (state["step"], float(state["total"]), state["moments"].nu) == (3, 3.0, None)
    assert np.array_equal(checkpoint.load(rank=1)["b"], values["b"])


def check_restored(trainer: raysgd.Trainer, checkpoint: raysgd.Checkpoint, num_workers: int, where: Any) -> None:
    for by_shardings in (False, True):
        config = {"where": where, "by_shardings": by_shardings}
        seen = trainer.run(restores, config, resume_from=checkpoint, callbacks=quiet(), returns="all")
        shown = f"SavedArray(state['params'][0], shape=({ROWS}, {COLUMNS}), dtype=float32)"
        assert seen == [{"saved": shown, "step": 3, "total": 3.0}] * num_workers


@pytest.mark.parametrize("where", [SAVED, TURNED, BY_ROWS], ids=["the same", "turned", "by rows"])
def test_restore_on_any_mesh_gives_the_same_bits(
    trainer: raysgd.Trainer, checkpoint: raysgd.Checkpoint, where: dict[str, Any]
) -> None:
    check_restored(trainer, checkpoint, 2, where)


@pytest.mark.parametrize(
    ("num_workers", "devices", "where"), [(1, 4, BY_COLUMNS), (3, 2, TURNED)], ids=["one", "three"]
)
def test_restore_with_any_number_of_workers_gives_the_same_bits(
    tmp_path: Path, checkpoint: raysgd.Checkpoint, num_workers: int, devices: int, where: dict[str, Any]
) -> None:
    with make_trainer(tmp_path, num_workers, raysgd.JaxConfig(devices_per_worker=devices)) as other:
        check_restored(other, checkpoint, num_workers, where)


@pytest.fixture(scope="module")
def alone(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    """A Trainer of one worker with one device."""
    with make_trainer(tmp_path_factory.mktemp("alone"), 1, "jax") as alone:
        yield alone


def test_state_of_one_worker_loads_in_any_number(trainer: raysgd.Trainer, alone: raysgd.Trainer) -> None:
    alone.run(saves, {"where": BY_ROWS}, callbacks=quiet())
    found = alone.get_last_checkpoint()
    seen = trainer.run(restores, {"where": TURNED}, resume_from=found, callbacks=quiet(), returns="all")
    assert [each["step"] for each in seen] == [3, 3]


def test_sharded_state_without_all_ranks_names_the_argument(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        raysgd.save_checkpoint(make_state(BY_ROWS, numbers(), 1))

    with pytest.raises(CheckpointError, match=r"state\['params'\]\[0\] is distributed.*all_ranks=True"):
        trainer.run(train_func, callbacks=quiet())


def test_replicated_and_local_arrays_need_no_ranks(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        import jax.numpy as jnp

        state = make_state(BY_ROWS, numbers(), 7)
        raysgd.save_checkpoint({"total": state["total"], "local": jnp.arange(3)})

    trainer.run(train_func, callbacks=quiet())
    state = trainer.get_last_checkpoint().load()
    assert (float(state["total"]), state["local"].tolist()) == (7.0, [0, 1, 2])


def test_state_that_differs_between_ranks_is_not_shared(trainer: raysgd.Trainer, alone: raysgd.Trainer) -> None:
    def train_func(config: dict[str, bool]) -> Any:
        saved = raysgd.load_checkpoint()
        if saved is not None:
            return saved["mine"].tolist()
        rank = raysgd.world_rank() if config["is_private"] else 0
        state = {"b": make_state(BY_ROWS, numbers(), 1)["b"], "mine": np.array([5, rank])}
        raysgd.save_checkpoint(state, all_ranks=True)
        return None

    shared, private = {"is_private": False}, {"is_private": True}
    trainer.run(train_func, shared, callbacks=quiet())
    assert alone.run(train_func, shared, resume_from=trainer.get_last_checkpoint(), callbacks=quiet()) == [5, 0]
    trainer.run(train_func, private, callbacks=quiet())
    saved = trainer.get_last_checkpoint()
    own = trainer.run(train_func, private, resume_from=saved, callbacks=quiet(), returns="all")
    assert own == [[5, 0], [5, 1]]
    with pytest.raises(ReshardError, match="mine differs between ranks 0 and 1"):
        alone.run(train_func, private, resume_from=saved, callbacks=quiet())
