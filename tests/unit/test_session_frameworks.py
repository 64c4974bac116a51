"""Values of JAX and TensorFlow as metrics and in checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.errors import MetricError
from raysgd.session.metrics import copy_metrics, read_deferred

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
jax = pytest.importorskip("jax")
tf = pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.jax, pytest.mark.tensorflow]
jnp = jax.numpy

SCALARS: dict[str, tuple[Callable[[], Any], Any]] = {
    "jax": (lambda: jnp.float32(1.5), 1.5),
    "jax bfloat16": (lambda: jnp.bfloat16(1.5), 1.5),
    "jax element": (lambda: jnp.arange(3)[2], 2),
    "jax bool": (lambda: jnp.array(True), True),
    "tensor": (lambda: tf.constant(2.5), 2.5),
    "tensor bool": (lambda: tf.constant(False), False),
    "variable": (lambda: tf.Variable(3), 3),
    "list": (lambda: [jnp.float32(1), {"a": tf.constant(2)}], [1.0, {"a": 2}]),
}
NONE: dict[str, Callable[[], Any]] = {
    "jax array": lambda: jnp.arange(3),
    "jax complex": lambda: jnp.complex64(1j),
    "jax key": lambda: jax.random.key(0),
    "tensor": lambda: tf.constant([1.0]),
    "string": lambda: tf.constant("a"),
    "complex": lambda: tf.constant(1j),
    "ragged": lambda: tf.ragged.constant([[1], [2, 3]]),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_are_metrics(name: str) -> None:
    make, value = SCALARS[name]
    read = read_deferred(copy_metrics({"x": make()}))["x"]
    assert read == value and type(read) is type(value)


def test_variable_is_reported_with_its_value_at_the_call() -> None:
    variable = tf.Variable(1.0)
    copied = copy_metrics({"x": variable})
    variable.assign(2.0)
    assert read_deferred(copied) == {"x": 1.0}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("is_replicated", [False, True])
def test_array_that_is_donated_after_the_call_is_reported(kind: str, is_replicated: bool) -> None:
    scalar = jnp.asarray(1, kind)
    if is_replicated:
        mesh = jax.make_mesh((1,), ("data",))
        scalar = jax.device_put(scalar, jax.NamedSharding(mesh, jax.P()))
    copied = copy_metrics({"x": scalar, "more": [scalar]})
    jax.jit(lambda value: value ^ value if kind == "bool" else value * 0, donate_argnums=0)(scalar)
    scalar.delete()
    assert read_deferred(copied) == {"x": 1, "more": [1]}


@pytest.mark.parametrize("name", NONE)
def test_value_that_is_not_a_number_is_named(name: str) -> None:
    with pytest.raises(MetricError, match=r"report\(x=\.\.\.\) got a .*not a metric"):
        copy_metrics({"x": NONE[name]()})


def test_arrays_are_loaded_as_numpy(tmp_path: Path) -> None:
    state = {
        "jax": {"w": jnp.full((2, 3), 0.5, jnp.bfloat16), "steps": [jnp.arange(3)]},
        "tf": (tf.constant([1.0, 2.0]), tf.Variable([[7]])),
    }
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint(state)
        back = raysgd.load_checkpoint()
    assert back["jax"]["w"].dtype == jnp.bfloat16 and np.all(back["jax"]["w"] == 0.5)
    assert back["jax"]["steps"][0].tolist() == [0, 1, 2]
    assert [array.tolist() for array in back["tf"]] == [[1, 2], [[7]]]


def test_checkpoint_has_arrays_as_they_were_before_they_were_donated(tmp_path: Path) -> None:
    double = jax.jit(lambda array: array * 2, donate_argnums=0)
    with raysgd.local(dir=tmp_path):
        weights, loss = jnp.arange(100_000.0), jnp.float32(4)
        raysgd.save_checkpoint({"weights": weights, "loss": loss}, metrics={"loss": loss})
        for _ in range(3):
            weights, loss = double(weights), double(loss)
        (saved,) = raysgd.list_checkpoints()
        assert saved.metrics["loss"] == 4.0
        state = saved.load()
    np.testing.assert_array_equal(state["weights"], np.arange(100_000.0))
    assert state["loss"] == 4.0
