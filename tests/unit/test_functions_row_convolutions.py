"""Convolutions for each row, such as gradients for each row, are the same on one device and on several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
backends = pytest.importorskip("jax.extend").backend
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from raysgd.functions.sharding import plan_sharding  # noqa: E402
from raysgd.functions.worker.steps import Steps  # noqa: E402

RANDOM = np.random.default_rng(0)
BATCH = {"x": RANDOM.normal(size=(16, 8, 8, 1)).astype(np.float32)}
PARAMS = {"kernel": 0.1 * RANDOM.normal(size=(3, 3, 1, 4)).astype(np.float32)}


@pytest.fixture(scope="module", autouse=True)
def four_devices() -> Iterator[None]:
    before = jax.config.jax_num_cpu_devices
    backends.clear_backends()
    jax.config.update("jax_num_cpu_devices", 4)
    yield
    backends.clear_backends()
    jax.config.update("jax_num_cpu_devices", before)


def of_row(params: Any, row: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(row[None], params["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
    return jnp.square(jnp.tanh(out)).mean()


def clipped_step(
    rng: Any, state: Any, batch: Any, loss_fn: Any, lr_schedule_fn: Any, mesh: Any, compute_dtype: Any
) -> Any:
    """A step of differentially private training: gradients of each row are clipped."""
    losses, grads = jax.vmap(jax.value_and_grad(of_row), (None, 0))(state.params, batch["x"])
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


@pytest.mark.parametrize("num_micro", [None, 2])
@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [("own step", True), ("loss", True), ("no convolution for each row", False)],
)
def test_training_is_that_of_one_device(
    kind: str, is_whole: bool, num_micro: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    if num_micro and kind == "own step":
        pytest.skip("an own step gets the whole batch")
    given: dict[str, Any] = {
        "own step": {"loss_fn": mean_loss, "train_step_fn": clipped_step},
        "loss": {"loss_fn": meta_loss},
        "no convolution for each row": {"loss_fn": mean_loss},
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
