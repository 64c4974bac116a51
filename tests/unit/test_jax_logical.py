"""Steps of logical workers with JAX in one process, and mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.session.local import LocalSession
from raysgd.session.logical import LogicalWorkers

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax


@contextmanager
def session(num_logical: int = 4, num_rows: int = 20) -> Iterator[None]:
    """Run as the only process of a run with so many logical workers."""
    rng = np.random.default_rng(0)
    installed = LocalSession(
        plan=resolve_datasets({"x": rng.random((num_rows, 3), np.float32)}, put=lambda block: block)
    )
    installed.logical = LogicalWorkers(num_logical, 0, 1, 0)
    context.install(installed)
    try:
        yield
    finally:
        context.uninstall()


def steps(batch_size: int = 5) -> Iterator[Any]:
    return raysgd.jax.logical_steps(raysgd.get_dataset().get_split().to_jax(batch_size))


@pytest.mark.parametrize(("num_logical", "num_rows"), [(1, 20), (4, 20), (4, 18), (7, 20), (3, 2)])
def test_gradients_and_metrics_are_means_over_all_rows(num_logical: int, num_rows: int) -> None:
    params = {"w": jax.numpy.ones(3), "b": jax.numpy.ones((), jax.numpy.bfloat16)}

    def loss_of(params: Any, x: Any) -> Any:
        return ((x @ params["w"] + params["b"].astype("float32")) ** 2).mean()

    with session(num_logical, num_rows):
        rows = raysgd.get_dataset().get_split(whole=True).to_jax(num_rows).first_batch()["x"]
        loss, expected = jax.value_and_grad(loss_of)(params, rows)
        (step,) = _run(
            steps(-(-num_rows // num_logical)), lambda batch: jax.value_and_grad(loss_of)(params, batch["x"])
        )
        np.testing.assert_allclose(step.gradients["w"], expected["w"], rtol=1e-5)
        assert step.gradients["b"].dtype == jax.numpy.bfloat16 and step.gradients["b"].shape == ()
        assert step.means()["loss"] == pytest.approx(float(loss), rel=1e-5)


def _run(found: Iterator[Any], compute: Any) -> list[Any]:
    done = []
    for step in found:
        for batch in step:
            loss, gradients = compute(batch)
            step.add(gradients)
            step.record(loss=loss)
        done.append(step)
    return done


def adds_nothing(step: Any) -> None:
    for _ in step:
        pass


def adds_twice(step: Any) -> None:
    for _ in step:
        step.add({"a": 1.0})
        step.add({"a": 1.0})


def adds_other_shapes(step: Any) -> None:
    for number, _ in enumerate(step):
        step.add({"a": np.zeros(number + 1, np.float32)})


MISTAKES = {
    adds_nothing: "added nothing",
    adds_twice: "once per batch",
    adds_other_shapes: "another tree",
    lambda step: step.add(1.0): "once per batch",
    lambda step: step.gradients: "known after the loop",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: Any) -> None:
    def run() -> None:
        for step in steps():
            mistake(step)

    with session(), pytest.raises(UsageError, match=MISTAKES[mistake]):
        run()


def test_only_means_of_real_numbers_and_only_batches() -> None:
    with session():
        with pytest.raises(ConfigError, match="to_jax"):
            raysgd.jax.logical_steps([1])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="int32"):
            _run(steps(), lambda batch: (0.0, {"a": jax.numpy.zeros(3, "int32")}))
