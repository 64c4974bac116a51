"""`raysgd.jax.restore` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.errors import CheckpointError

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax


@pytest.fixture
def sharding() -> Any:
    return jax.sharding.NamedSharding(raysgd.jax.mesh(), jax.sharding.PartitionSpec())


def test_state_is_saved_and_restored_in_one_process(tmp_path: Path, sharding: Any) -> None:
    state = {"w": jax.device_put(np.arange(6.0, dtype=np.float32), sharding), "n": jax.numpy.int32(3), "step": 1}
    with raysgd.local(dir=tmp_path):
        for all_ranks in (False, True):
            raysgd.save_checkpoint(state, all_ranks=all_ranks)
            saved = raysgd.load_checkpoint()
            assert type(saved["w"]) is np.ndarray  # one process holds the whole array
            restored = raysgd.jax.restore(saved, like=state)
            assert restored["w"].sharding == sharding and restored["w"].tolist() == list(range(6))
            assert not restored["n"].committed and int(restored["n"]) == 3 and restored["step"] == 1


def test_like_takes_shapes_shardings_and_other_values(sharding: Any) -> None:
    values = np.ones((2, 3), np.float32)
    shape = jax.ShapeDtypeStruct((2, 3), np.float32, sharding=sharding)
    by_shape = raysgd.jax.restore([values, 5, values], like=[shape, 0, sharding])
    assert [by_shape[0].sharding, by_shape[2].sharding] == [sharding, sharding] and by_shape[1] == 5
    unplaced = raysgd.jax.restore(values, like=jax.ShapeDtypeStruct((2, 3), np.float32))
    assert isinstance(unplaced, jax.Array)
    assert raysgd.jax.restore({"a": values}, like={"a": np.zeros(1)})["a"] is values


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            {"w": np.ones((2, 4), np.float32)},
            r"state\['w'\] was saved as float32 of shape \(2, 4\); .* of shape \(2, 3\)",
        ),
        ({"w": np.ones((2, 3))}, r"state\['w'\] was saved as float64 of shape \(2, 3\); .* has float32"),
        ({}, r"state\['w'\] is in restore\(..., like=...\) but was not saved"),
        ({"w": np.ones((2, 3), np.float32), "b": [1]}, r"state\['b'\]\[0\] was saved but is not in"),
        ({"w": {"x": 1}}, r"state\['w'\]\['x'\] was saved but is not in"),
    ],
)
def test_state_that_does_not_match_like_is_refused(sharding: Any, saved: Any, message: str) -> None:
    like = {"w": jax.ShapeDtypeStruct((2, 3), np.float32, sharding=sharding)}
    with pytest.raises(CheckpointError, match=message):
        raysgd.jax.restore(saved, like=like)


def test_arrays_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    donated = jax.numpy.ones(3)
    donated.delete()
    with raysgd.local(dir=tmp_path):
        with pytest.raises(CheckpointError, match=r"state\['x'\] was deleted, as JAX deletes donated arrays"):
            raysgd.save_checkpoint({"x": donated})
        with pytest.raises(CheckpointError, match=r"state\[0\] is an array of key<fry>: save jax.random.key_data"):
            raysgd.save_checkpoint([jax.random.key(0)])
