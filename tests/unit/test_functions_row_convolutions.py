"""Convolutions for each row, such as gradients for each row, are the same on one device and on several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from raysgd.functions.sharding import plan_sharding  # noqa: E402
from raysgd.functions.worker.steps import Steps  # noqa: E402
from support.jax_devices import cpu_devices  # noqa: E402

RANDOM = np.random.default_rng(0)
BATCH = {"x": RANDOM.normal(size=(16, 8, 8, 1)).astype(np.float32)}
PARAMS = {"kernel": 0.1 * RANDOM.normal(size=(3, 3, 1, 4)).astype(np.float32)}


@pytest.fixture(scope="module", autouse=True)
def four_devices() -> Iterator[None]:
    with cpu_devices(4):
        yield


def of_row(params: Any, row: Any, **layer: Any) -> Any:
    layer = {"window_strides": (1, 1), "padding": "SAME", **layer}
    numbers = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(row[None], params["kernel"], dimension_numbers=numbers, **layer)
    return jnp.square(jnp.tanh(out)).mean()


def clipped_step(rng: Any, state: Any, batch: Any, layer: dict[str, Any], **settings: Any) -> Any:
    """A step of differentially private training: gradients of each row are clipped."""
    losses, grads = jax.vmap(jax.value_and_grad(partial(of_row, **layer)), (None, 0))(state.params, batch["x"])
    norms = jnp.sqrt(sum(jnp.square(leaf).sum(axis=(1, 2, 3, 4)) for leaf in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda leaf: (leaf / jnp.maximum(norms, 0.01)[:, None, None, None, None]).mean(0), grads)
    return state.apply_gradients(grads=clipped), {"loss": losses.mean()}


def meta_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    """A loss of meta-learning: of the parameters after a step on each row."""

    def after_step(row: Any) -> Any:
        inner = jax.grad(of_row)(params, row)
        return of_row(jax.tree.map(lambda leaf, grad: leaf - 0.5 * grad, params, inner), row)

    return jax.vmap(after_step)(batch["x"]).mean()


def mean_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    return jax.vmap(of_row, (None, 0))(params, batch["x"]).mean()


def depthwise_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    """A layer with a group for each of 16 channels, as many as rows."""
    numbers = ("NHWC", "HWIO", "NHWC")
    wide = jnp.tile(batch["x"], (1, 1, 1, 16))
    kernel = jnp.tile(params["kernel"], (1, 1, 1, 4))
    out = jax.lax.conv_general_dilated(wide, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=16)
    return jnp.square(jnp.tanh(out)).mean()


@pytest.mark.parametrize("num_micro", [None, 2])
@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [
        ("own step", True),
        ("strides", True),
        ("dilation", True),
        ("transposed", True),
        ("loss", True),
        ("no convolution for each row", False),
        ("depthwise", False),
    ],
)
def test_training_is_that_of_one_device(
    kind: str, is_whole: bool, num_micro: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    if num_micro and is_whole and kind != "loss":
        pytest.skip("an own step gets the whole batch")
    given: dict[str, Any] = {
        "own step": {"loss_fn": mean_loss, "train_step_fn": partial(clipped_step, layer={})},
        "strides": {"loss_fn": mean_loss, "train_step_fn": partial(clipped_step, layer={"window_strides": (2, 2)})},
        "dilation": {"loss_fn": mean_loss, "train_step_fn": partial(clipped_step, layer={"rhs_dilation": (2, 2)})},
        "transposed": {
            "loss_fn": mean_loss,
            "train_step_fn": partial(clipped_step, layer={"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}),
        },
        "loss": {"loss_fn": meta_loss},
        "no convolution for each row": {"loss_fn": mean_loss},
        "depthwise": {"loss_fn": depthwise_loss},
    }[kind]
    found = {}
    for devices in (1, 4):
        mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1), ("data", "model"))
        plan = plan_sharding(PARAMS, dict(mesh.shape))
        steps = Steps(mesh, plan, optimizer=optax.sgd(0.5), accumulate_grad_batches=num_micro, **given)
        state = steps.make_state(PARAMS, 0)
        for _ in range(2):
            state, metrics = steps.train(state, steps.place_batch(BATCH))
        found[devices] = np.asarray(state.params["kernel"]), float(metrics["loss"])
        assert steps.num_compilations["train"] == 1
    np.testing.assert_allclose(found[4][0], found[1][0], rtol=0, atol=1e-6)
    assert found[4][1] == pytest.approx(found[1][1], abs=1e-6)
    assert ("each device computes all rows" in caplog.text) == is_whole
