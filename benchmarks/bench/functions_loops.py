"""The same training as functions for `raysgd.functions`, by hand with JAX, and with redco. Runs in workers.

Loops stay in this module between runs, so that what they compiled is used again, as `raysgd.functions` does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, HIDDEN, NUM_CLASSES = 256, 1024, 16
_LOOPS: dict[Any, Any] = {}


def make_params() -> dict[str, Any]:
    drawn = np.random.default_rng(0)
    sizes = {"dense_0": (WIDTH, HIDDEN), "dense_1": (HIDDEN, WIDTH), "dense_2": (WIDTH, NUM_CLASSES)}
    return {
        name: {
            "kernel": drawn.normal(0, shape[0] ** -0.5, shape).astype(np.float32),
            "bias": np.zeros(shape[1], np.float32),
        }
        for name, shape in sizes.items()
    }


def make_examples(number: int) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(1)
    rows = drawn.normal(size=(number, WIDTH)).astype(np.float32)
    return [{"x": row, "y": place % NUM_CLASSES} for place, row in enumerate(rows)]


def make_optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "x": np.stack([each["x"] for each in examples]),
        "y": np.array([each["y"] for each in examples], np.int32),
    }


def loss_fn(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    hidden = jax.nn.gelu(batch["x"] @ params["dense_0"]["kernel"] + params["dense_0"]["bias"])
    hidden = jax.nn.gelu(hidden @ params["dense_1"]["kernel"] + params["dense_1"]["bias"])
    logits = hidden @ params["dense_2"]["kernel"] + params["dense_2"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


# -- by hand -------------------------------------------------------------------------------------------------------------


_BY_COLUMNS = PartitionSpec(None, "model"), PartitionSpec("model")
_SPECS = {"dense_0": _BY_COLUMNS, "dense_1": (PartitionSpec("model", None), PartitionSpec()), "dense_2": _BY_COLUMNS}


class ByHand:
    """`jax.jit` with a sharding for each array, those that `raysgd.functions` chooses; the optimizer's state along both axes."""

    def __init__(self, num_shards: int) -> None:
        mesh = Mesh(np.array(jax.devices()).reshape(-1, num_shards), ("data", "model"))
        specs = jax.tree.map(lambda _: PartitionSpec(), make_params())
        if num_shards > 1:
            specs = {name: dict(zip(("kernel", "bias"), pair, strict=True)) for name, pair in _SPECS.items()}
        self._optimizer = make_optimizer()
        self._batch_sharding = NamedSharding(mesh, PartitionSpec("data"))
        replicated = NamedSharding(mesh, PartitionSpec())
        params = jax.tree.map(
            lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), make_params(), specs
        )
        moments = jax.tree.map(
            lambda array, spec: NamedSharding(mesh, _with_data(array.shape, spec, mesh.shape["data"])), params, specs
        )
        state_like = jax.eval_shape(self._optimizer.init, params)
        shardings = optax.tree.map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            state_like,
            moments,
            transform_non_params=lambda _: replicated,
        )
        opt_state = jax.jit(self._optimizer.init, out_shardings=shardings)(params)
        self._state = params, opt_state
        found = (jax.tree.map(lambda array: array.sharding, params), shardings), replicated
        self._step = jax.jit(self._update, donate_argnums=0, out_shardings=found)

    def _update(self, state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: loss_fn(None, None, params, batch, True))(params)
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "norm": optax.tree.norm(grads)}

    def train(self, examples: Sequence[Any], rows: int, seed: int) -> list[float]:
        """Train for an epoch; return the time at the end of each step."""
        order = np.random.default_rng(seed).permutation(len(examples))
        times, unread = [], None
        for start in range(0, len(order), rows):
            batch = collate_fn([examples[row] for row in order[start : start + rows]])
            placed = jax.device_put(batch, self._batch_sharding)
            self._state, metrics = self._step(self._state, placed)
            if unread is not None:  # of the step before, so that the device has the next one to do
                float(unread["loss"])
            unread = metrics
            times.append(time.time())
        return times


def _with_data(shape: tuple[int, ...], spec: PartitionSpec, num_data: int) -> PartitionSpec:
    """Add the data axis to the largest dimension that is not sharded yet, or else to the one that is."""
    entries: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
    for place in sorted(range(len(shape)), key=lambda place: -shape[place]):
        if entries[place] is None and shape[place] % num_data == 0:
            entries[place] = "data"
            return PartitionSpec(*entries)
    return PartitionSpec(*[("model", "data") if entry == "model" else entry for entry in entries])


def train_by_hand(config: dict[str, Any]) -> list[float]:
    """Train for an epoch by hand, in a run of raysgd: a train_func."""
    loop = _find_loop(("by hand", config["shards"]), lambda: ByHand(config["shards"]))
    return loop.train(config["examples"].load(), config["rows"], config["seed"])  # type: ignore[no-any-return]


class Examples:
    """The examples, made once in each process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def load(self) -> list[dict[str, Any]]:
        return _find_loop(("examples", self._number), lambda: make_examples(self._number))  # type: ignore[no-any-return]


# -- redco ---------------------------------------------------------------------------------------------------------------


class WithRedco:
    """redco's Trainer, on the devices of this process."""

    def __init__(self, num_shards: int) -> None:
        import redco

        times = self._times = []  # type: list[float]

        class TimedDeployer(redco.Deployer):  # type: ignore[misc, name-defined]
            def log_metrics(self, metrics: Any, step: int) -> None:
                float(metrics["loss"])
                times.append(time.time())

        def redco_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
            return loss_fn(rng, state, params, batch, is_training)

        deployer = TimedDeployer(jax_seed=0, n_model_shards=num_shards, verbose=False)
        params = jax.tree.map(jnp.asarray, make_params())
        rules = deployer.get_sharding_rules(params) if num_shards > 1 else None
        self._copies = jax.device_count() // num_shards
        self._trainer = redco.Trainer(
            deployer,
            collate_fn=collate_fn,
            apply_fn=None,
            loss_fn=redco_loss,
            params=params,
            optimizer=make_optimizer(),
            params_sharding_rules=rules,
        )

    def train(self, examples: Sequence[Any], rows: int) -> list[float]:
        del self._times[:]
        self._trainer.train(examples, per_device_batch_size=rows // self._copies)
        return [*self._times]


def train_with_redco(config: dict[str, Any]) -> list[float]:
    """Train for an epoch with redco, in a run of raysgd: a train_func."""
    if config["redco"] not in sys.path:
        sys.path.append(config["redco"])  # last, so that nothing else is replaced
    loop = _find_loop(("redco", config["shards"]), lambda: WithRedco(config["shards"]))
    return loop.train(config["examples"].load(), config["rows"])  # type: ignore[no-any-return]


def _find_loop(key: Any, make: Any) -> Any:
    if key not in _LOOPS:
        _LOOPS[key] = make()
    return _LOOPS[key]
