"""The same training as functions for `raysgd.functions`, by hand with JAX, and with redco. Runs in workers.

Loops stay in this module between runs, so that what they compiled is used again, as `raysgd.functions` does.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NUM_CLASSES, VOCABULARY = 16, 8192
_LOOPS: dict[Any, Any] = {}


@dataclass(frozen=True)
class Perceptron:
    """Three dense layers."""

    width: int
    hidden: int

    def make_params(self) -> dict[str, Any]:
        shapes = {
            "dense_0": (self.width, self.hidden),
            "dense_1": (self.hidden, self.width),
            "dense_2": (self.width, NUM_CLASSES),
        }
        return {name: _make_dense(np.random.default_rng(0), *shape) for name, shape in shapes.items()}

    def make_examples(self, number: int) -> list[dict[str, Any]]:
        rows = np.random.default_rng(1).normal(size=(number, self.width)).astype(np.float32)
        return [{"x": row, "y": place % NUM_CLASSES} for place, row in enumerate(rows)]

    def logits_of(self, params: Any, x: Any) -> Any:
        hidden = _apply(params["dense_1"], jax.nn.gelu(_apply(params["dense_0"], x)))
        return _apply(params["dense_2"], jax.nn.gelu(hidden))


@dataclass(frozen=True)
class Transformer:
    """A language model of blocks without normalisation of its own, which costs no time worth measuring."""

    width: int
    layers: int
    length: int
    heads: int = 8

    def make_params(self) -> dict[str, Any]:
        drawn, width = np.random.default_rng(0), self.width
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        blocks = {
            f"block_{number}": {name: _make_dense(drawn, *size) for name, size in sizes.items()}
            for number in range(self.layers)
        }
        table = drawn.normal(0, 0.02, (VOCABULARY, width)).astype(np.float32)
        return {"embedding": {"kernel": table}, **blocks}

    def make_examples(self, number: int) -> list[dict[str, Any]]:
        rows = np.random.default_rng(1).integers(0, VOCABULARY, (number, self.length + 1), np.int32)
        return [{"x": row[:-1], "y": row[1:]} for row in rows]

    def logits_of(self, params: Any, x: Any) -> Any:
        hidden = params["embedding"]["kernel"][x]
        for number in range(self.layers):
            block = params[f"block_{number}"]
            parts = _apply(block["qkv"], jax.nn.standardize(hidden)).reshape(*x.shape, 3, self.heads, -1)
            query, key, value = (parts[..., place, :, :] for place in range(3))
            attended = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(hidden.shape)
            hidden += _apply(block["out"], attended)
            hidden += _apply(block["down"], jax.nn.gelu(_apply(block["up"], jax.nn.standardize(hidden))))
        return hidden @ params["embedding"]["kernel"].T


#: The models, and the rows of their batches.
MODELS: dict[str, tuple[Any, int]] = {
    "small": (Perceptron(32, 128), 64),
    "perceptron": (Perceptron(256, 1024), 256),
    "transformer": (Transformer(width=384, layers=9, length=32), 4),
}


def _make_dense(drawn: np.random.Generator, inputs: int, outputs: int) -> dict[str, Any]:
    kernel = drawn.normal(0, inputs**-0.5, (inputs, outputs)).astype(np.float32)
    return {"kernel": kernel, "bias": np.zeros(outputs, np.float32)}


def _apply(dense: Any, x: Any) -> Any:
    return x @ dense["kernel"] + dense["bias"]


def make_optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "x": np.stack([each["x"] for each in examples]),
        "y": np.array([each["y"] for each in examples], np.int32),
    }


@dataclass(frozen=True)
class LossOf:
    """The loss of a model, as `raysgd.functions` and redco call it."""

    model: str

    def __call__(self, rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        logits = MODELS[self.model][0].logits_of(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def make_mesh(num_shards: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(-1, num_shards), ("data", "model"))


# -- by hand -------------------------------------------------------------------------------------------------------------


_BY_COLUMNS = PartitionSpec(None, "model"), PartitionSpec("model")
_SPECS = {"dense_0": _BY_COLUMNS, "dense_1": (PartitionSpec("model", None), PartitionSpec()), "dense_2": _BY_COLUMNS}


class ByHand:
    """`jax.jit` with a sharding for each array: parameters as `raysgd.functions` chooses it, the optimizer's state as these."""

    def __init__(self, model: str, num_shards: int) -> None:
        mesh = make_mesh(num_shards)
        params = MODELS[model][0].make_params()
        specs = jax.tree.map(lambda _: PartitionSpec(), params)
        if num_shards > 1:
            specs = {name: dict(zip(("kernel", "bias"), pair, strict=True)) for name, pair in _SPECS.items()}
        self._loss_fn = LossOf(model)
        self._optimizer = make_optimizer()
        self._batch_sharding = NamedSharding(mesh, PartitionSpec("data"))
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        params = jax.tree.map(jax.make_array_from_process_local_data, shardings, params)
        of_state = optax.tree.map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, params),
            shardings,
            transform_non_params=lambda _: replicated,
        )
        self._state = params, jax.jit(self._optimizer.init, out_shardings=of_state)(params)
        self.step = jax.jit(self._update, donate_argnums=0, out_shardings=((shardings, of_state), replicated))

    def _update(self, state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: self._loss_fn(None, None, params, batch, True))(params)
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "norm": optax.tree.norm(grads)}

    def place(self, batch: Any) -> Any:
        return jax.tree.map(lambda array: jax.make_array_from_process_local_data(self._batch_sharding, array), batch)

    def lower(self, batch: Any) -> Any:
        return self.step.lower(self._state, self.place(batch))

    def train(self, examples: Sequence[Any], rows: int, seed: int) -> list[float]:
        """Train for an epoch; return the time at the end of each step. Each process collates the rows of its own devices."""
        order = np.random.default_rng(seed).permutation(len(examples))
        own = rows // jax.process_count()
        times, unread = [], None
        for start in range(jax.process_index() * own, len(order), rows):
            placed = self.place(collate_fn([examples[row] for row in order[start : start + own]]))
            self._state, metrics = self.step(self._state, placed)
            if unread is not None:  # of the step before, so that the device has the next one to do
                float(unread["loss"])
            unread = metrics
            times.append(time.time())
        float(metrics["loss"])
        return times


def train_by_hand(config: dict[str, Any]) -> list[float]:
    """Train for an epoch by hand, in a run of raysgd: a train_func."""
    return _by_hand(config).train(_examples(config), config["rows"], config["seed"])


def _by_hand(config: dict[str, Any]) -> ByHand:
    model, shards = config["model"], config["shards"]
    return _find_loop(("by hand", model, shards), lambda: ByHand(model, shards))  # type: ignore[no-any-return]


def _examples(config: dict[str, Any]) -> list[Any]:
    model, number = config["model"], config["steps"] * config["rows"]
    return _find_loop(  # type: ignore[no-any-return]
        ("examples", model, number), lambda: MODELS[model][0].make_examples(number)
    )


# -- redco ---------------------------------------------------------------------------------------------------------------


class WithRedco:
    """redco's Trainer, on the devices of this process."""

    def __init__(self, model: str, num_shards: int) -> None:
        import redco

        times = self._times = []  # type: list[float]

        class TimedDeployer(redco.Deployer):  # type: ignore[misc, name-defined]
            def log_metrics(self, metrics: Any, step: int) -> None:
                float(metrics["loss"])
                times.append(time.time())

        deployer = TimedDeployer(jax_seed=0, n_model_shards=num_shards, verbose=False)
        params = jax.tree.map(jnp.asarray, MODELS[model][0].make_params())
        rules = deployer.get_sharding_rules(params) if num_shards > 1 else None
        self._copies = jax.device_count() // num_shards
        self._trainer = redco.Trainer(
            deployer,
            collate_fn=collate_fn,
            apply_fn=None,
            loss_fn=LossOf(model),
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
    model, shards = config["model"], config["shards"]
    loop = _find_loop(("redco", model, shards), lambda: WithRedco(model, shards))
    return loop.train(_examples(config), config["rows"])  # type: ignore[no-any-return]


# -- where a step's time goes --------------------------------------------------------------------------------------------


def time_parts(config: dict[str, Any]) -> dict[str, Any]:
    """Measure the parts of a step of raysgd one by one, each until its result is there: a train_func.

    Returns:
        The milliseconds of each part, and the collectives of a compiled step of raysgd and of the loop by hand.
    """
    import raysgd
    from raysgd.functions.sharding import plan_sharding
    from raysgd.functions.worker.steps import Steps, mesh_of

    params, (rows, examples) = MODELS[config["model"]][0].make_params(), (config["rows"], _examples(config))
    mesh = mesh_of(config["shards"])
    plan = plan_sharding(params, dict(mesh.shape))
    steps = Steps(mesh, plan, loss_fn=LossOf(config["model"]), optimizer=make_optimizer())
    whole = collate_fn(examples[:rows])
    own = jax.tree.map(lambda array: array[: rows // jax.process_count()], whole)
    placed = steps.place_batch(whole)
    state, metrics = steps.train(steps.make_state(params, 0), placed)
    replicated = NamedSharding(mesh, PartitionSpec())
    gradients = [jax.ShapeDtypeStruct((jax.device_count(), leaf.size), leaf.dtype) for leaf in jax.tree.leaves(params)]
    by_device = NamedSharding(mesh, PartitionSpec(("data", "model")))
    parts = [
        jax.make_array_from_callback(
            each.shape, by_device, lambda index, each=each: np.ones((1, each.shape[1]), each.dtype)
        )
        for each in gradients
    ]
    add = jax.jit(lambda parts: [part.sum(0) for part in parts], out_shardings=replicated)

    def train() -> None:
        nonlocal state, metrics
        state, metrics = steps.train(state, placed)
        jax.block_until_ready(metrics)

    def report() -> None:
        raysgd.report({name: metrics[name] for name in ("loss", "grad_norm")})

    measured: dict[str, Callable[[], Any]] = {
        "collate": lambda: collate_fn(examples[:rows]),
        "place": lambda: steps.place_batch(whole),
        "step": train,
        "collective": lambda: jax.block_until_ready(add(parts)),
        "report": report,
    }
    return {
        "ms": {name: _median_ms(call, config["repeats"]) for name, call in measured.items()},
        "collectives": {
            "raysgd": _count_collectives(steps.lower_train(whole)),
            "by_hand": _count_collectives(_by_hand(config).lower(own)),
        },
    }


def _median_ms(call: Callable[[], Any], number: int) -> float:
    seconds = []
    for _ in range(number + 3):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return 1000 * float(np.median(seconds[3:]))


def _count_collectives(lowered: Any) -> int:
    text = lowered.compile().as_text()
    return len(
        re.findall(r" (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", text)
    )


def _find_loop(key: Any, make: Any) -> Any:
    if key not in _LOOPS:
        _LOOPS[key] = make()
    return _LOOPS[key]
