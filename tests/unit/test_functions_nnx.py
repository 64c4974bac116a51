"""Modules of flax's nnx in `raysgd.functions`, in this process in place of workers: dropout, statistics, filters, shardings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.errors import ConfigError
from raysgd.functions import Deployer, Predictor, Trainer

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.jax

from support.functions_local import LocalRuns  # noqa: E402
from support.jax_devices import cpu_devices  # noqa: E402

RANDOM = np.random.default_rng(0)
EXAMPLES = [{"x": RANDOM.normal(size=8).astype(np.float32)} for _ in range(24)]


@pytest.fixture(scope="module", autouse=True)
def four_devices() -> Iterator[None]:
    with cpu_devices(4):
        yield


def make_deployer(folder: Path, shards: int = 1) -> Deployer:
    deployer = Deployer(3, n_model_shards=shards, workdir=folder, verbose=False, devices_per_worker=4)
    deployer.runs = LocalRuns(folder)  # type: ignore[assignment]
    return deployer


class Network(nnx.Module):  # type: ignore[misc, name-defined]
    def __init__(self, rngs: Any, rate: float = 0.5) -> None:
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)  # Adam would follow the noise of a bias without effect
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))[:, 0]


def make_network(rate: float = 0.5) -> Any:
    return Network(nnx.Rngs(0), rate)


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Any]:
    x = np.stack([each["x"] for each in examples])
    return {"x": x, "y": x.sum(axis=1)}


def loss_fn(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def pred_fn(model: Any, batch: Any) -> Any:
    return model(batch["x"])


def fit(
    folder: Path, model: Any, shards: int = 1, n_epochs: int = 2, batch_size: int = 8, **settings: Any
) -> tuple[Any, Any]:
    optimizer = settings.pop("optimizer", optax.adam(0.01))
    kept = {"save_last_ckpt": True, **{name: settings.pop(name) for name in ("resume_from",) if name in settings}}
    deployer = make_deployer(folder, shards)
    trainer = Trainer(deployer, collate_fn, loss_fn=loss_fn, params=model, optimizer=optimizer, **settings)
    result = trainer.fit(
        lambda epoch_idx: EXAMPLES, batch_size // (4 // shards), n_epochs, eval_examples=EXAMPLES[:5], **kept
    )
    return trainer, result


def leaves_of(model: Any) -> dict[str, Any]:
    state = nnx.state(model, nnx.Not(nnx.RngState))
    return {jax.tree_util.keystr(keys): np.asarray(leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(state)}


def check_near(one: Any, other: Any) -> None:
    found, expected = leaves_of(one), leaves_of(other)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_module_is_trained_as_a_loop_of_nnx_trains_it(tmp_path: Path) -> None:
    """Without dropout, whose random numbers differ: losses, parameters, and the statistics of batch normalization."""
    model = make_network(rate=0.0)
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    trainer, result = fit(tmp_path, make_network(rate=0.0), optimizer=optimizer, batch_size=24)  # in any order of rows
    losses = []
    for _ in range(2):
        model.train()
        loss, grads = nnx.value_and_grad(loss_fn)(model, collate_fn(EXAMPLES))
        optimizer.update(model, grads)
        losses.append(float(loss))
    model.eval()
    assert [each["train_loss"] for each in result.history] == pytest.approx(losses, abs=1e-5)
    check_near(result.params, model)
    assert result.metrics["eval_loss"] == pytest.approx(float(loss_fn(model, collate_fn(EXAMPLES[:5]))), abs=1e-5)
    for predictor in (trainer.get_default_predictor(pred_fn), Predictor(trainer.deployer, collate_fn, pred_fn)):
        given = None if predictor._find_params else result.params
        predictions = predictor.predict(EXAMPLES[:5], 2, given)
        np.testing.assert_allclose(predictions, model(collate_fn(EXAMPLES[:5])["x"]), atol=1e-5)

    def kernel_of(params: Any, batch: Any) -> Any:
        return batch["x"] @ params["up"]["kernel"]["value"]  # without the module, a checkpoint has nested dicts

    trained = result.params
    trained.train()
    trained(collate_fn(EXAMPLES)["x"])  # the script may train on by itself
    rows = Predictor(trainer.deployer, collate_fn, kernel_of).predict(EXAMPLES[:5], 2, result.checkpoints["last"])
    assert np.shape(rows) == (5, 16)


def test_losses_and_statistics_do_not_depend_on_the_shards(tmp_path: Path) -> None:
    _, expected = fit(tmp_path / "one", make_network())
    _, found = fit(tmp_path / "more", make_network(), shards=4)
    assert found.metrics["train_loss"] == pytest.approx(expected.metrics["train_loss"], abs=1e-5)
    assert found.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], abs=1e-5)
    check_near(found.params, expected.params)


def test_dropout_draws_other_numbers_in_each_layer_and_step(tmp_path: Path) -> None:
    class Twice(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.scale = nnx.Param(jax.numpy.ones(()))
            self.one, self.other = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> tuple[Any, Any]:
            ones = jax.numpy.ones_like(x) * self.scale
            return self.one(ones), self.other(ones)

    def loss_fn(model: Any, batch: Any) -> Any:
        one, other = model(batch["x"])
        return (one != other).mean() * 1000 + one.mean() + 0 * model.scale

    trainer = Trainer(
        make_deployer(tmp_path), collate_fn, loss_fn=loss_fn, params=Twice(nnx.Rngs(0)), optimizer=optax.sgd(0.0)
    )
    found = [trainer.train(EXAMPLES, 6).metrics["train_loss"] for _ in range(3)]
    assert all(400 < loss < 600 for loss in found) and len(set(found)) == 3
    assert trainer.eval_loss(EXAMPLES, 6) == pytest.approx(1.0)  # no dropout


def test_variables_that_the_optimizer_leaves_out_keep_their_values(tmp_path: Path) -> None:
    model = make_network(rate=0.0)
    model.up = nnx.LoRA(8, 2, 16, base_module=model.up, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.LoRAParam)
    before = leaves_of(model)
    _, result = fit(tmp_path, model, shards=2, optimizer=optimizer)
    changed = {name for name, value in leaves_of(result.params).items() if not np.array_equal(value, before[name])}
    assert {name.split("'")[3] for name in changed} == {"lora_a", "lora_b", "mean", "var"}
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_training_resumes_with_variables_of_all_types_and_stacked_layers(tmp_path: Path) -> None:
    """Tables of integers, plain arrays, the streams of each layer of a scan, and `nnx.Rngs` as attributes."""

    class Block(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.linear, self.dropout = nnx.Linear(8, 8, use_bias=False, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dropout(self.norm(self.linear(x)))

    class Stacked(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
            self.order = nnx.Variable(jax.numpy.arange(8)[::-1])
            self.scales, self.rngs = jax.numpy.ones(8), rngs

        def __call__(self, x: Any) -> Any:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
            return (x[:, self.order[...]] * self.scales + 0.1 * self.rngs.noise.normal(x.shape)).sum(axis=1)

    streams = nnx.Rngs(0, noise=1)
    _, expected = fit(tmp_path / "whole", Stacked(streams), n_epochs=2)
    fit(tmp_path / "parts", Stacked(nnx.Rngs(0, noise=1)), n_epochs=1)
    _, found = fit(tmp_path / "parts", Stacked(nnx.Rngs(0, noise=1)), shards=2, n_epochs=2, resume_from="last")
    assert found.history[-1]["train_loss"] == pytest.approx(expected.history[-1]["train_loss"], abs=1e-5)
    check_near(found.params, expected.params)
    assert found.params.order.get_value().tolist() == [*range(8)][::-1]


def test_linen_model_with_statistics_is_trained_as_a_module(tmp_path: Path) -> None:
    class Linen(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact
        def __call__(self, x: Any, is_training: bool = False) -> Any:
            return nn.Dense(1)(nn.BatchNorm(use_running_average=not is_training)(nn.Dense(8)(x)))[:, 0]

    def loss_fn(model: Any, batch: Any, is_training: bool) -> Any:
        return ((model(batch["x"], is_training=is_training, mutable=["batch_stats"]) - batch["y"]) ** 2).mean()

    model = nnx.bridge.ToNNX(Linen(), nnx.Rngs(0)).lazy_init(jax.numpy.ones((2, 8)))
    trainer = Trainer(make_deployer(tmp_path), collate_fn, loss_fn=loss_fn, params=model, optimizer=optax.adam(0.01))
    first, second = (trainer.train(EXAMPLES, 2) for _ in range(2))
    assert second.metrics["train_loss"] < first.metrics["train_loss"]
    assert np.asarray(jax.tree.leaves(nnx.state(second.params, nnx.BatchStat))[0]).any()


def test_tied_weights_are_trained_once(tmp_path: Path) -> None:
    class Tied(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.one = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.other = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.other.kernel = self.one.kernel

        def __call__(self, x: Any) -> Any:
            return self.other(self.one(x)).sum(axis=1)

    trainer, result = fit(tmp_path, Tied(nnx.Rngs(0)), shards=2)
    model = result.params
    assert model.one.kernel is model.other.kernel
    assert len(jax.tree.leaves(trainer.state.params)) == 1


def test_shardings_that_variables_declare_are_used(tmp_path: Path) -> None:
    def init(*names: Any) -> Any:
        return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(8, 16, kernel_init=init("model", None), rngs=nnx.Rngs(0))
        logical = nnx.Linear(8, 16, kernel_init=init("embed", "mlp"), rngs=nnx.Rngs(0))
    deployer = make_deployer(tmp_path, shards=2)
    assert "declared by the model" in str(deployer.get_sharding_rules(layer))
    assert ("^kernel$", jax.P("model", None)) in deployer.get_sharding_rules(layer)
    with nnx.logical_axis_rules([("embed", None), ("mlp", "model")]):
        assert ("^kernel$", jax.P(None, "model")) in deployer.get_sharding_rules(logical)
    with pytest.raises(ConfigError, match=r"declares the sharding .* of kernel.*no axis 'embed'.*logical_axis_rules"):
        deployer.get_sharding_rules(logical)
    boxed = nn.Dense(16, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp")))
    boxed = boxed.init(jax.random.PRNGKey(0), np.ones((1, 8)))["params"]
    with nn.logical_axis_rules([("embed", "model"), ("mlp", None)]):
        assert ("^kernel$", jax.P("model", None)) in deployer.get_sharding_rules(boxed)
    with pytest.raises(ConfigError, match="no axis 'embed'"):
        deployer.get_sharding_rules(boxed)
    with pytest.raises(ConfigError, match="divide by 2"):
        deployer.get_sharding_rules(
            {"a": nnx.Param(np.ones((3, 2), np.float32), out_sharding=("model", None), eager_sharding=False)}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "extra", nnx.BatchStat(jax.numpy.ones(2))), "changed which variables .* extra"),
        (
            lambda model: setattr(model.norm, "mean", nnx.BatchStat(jax.numpy.ones(2))),
            "changed which variables .* norm/mean",
        ),
    ],
)
def test_function_that_adds_variables_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    def changing(model: Any, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        change(model)
        return loss

    trainer = Trainer(
        make_deployer(tmp_path), collate_fn, loss_fn=changing, params=make_network(), optimizer=optax.sgd(0.1)
    )
    with pytest.raises(ConfigError, match=message):
        trainer.train(EXAMPLES, 2)


def used_optimizer() -> Any:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model))
    return optimizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"params": nnx.eval_shape(make_network)}, "is a shape without values"),
        ({"params": nnx.Dropout(0.5)}, "without variables of the type"),
        ({"params": make_network(), "train_step_fn": print}, "nnx.split"),
        ({"params": nnx.state(make_network())}, "has no gradient"),
        (
            {"params": make_network(), "optimizer": used_optimizer()},
            "has made 1 steps, and its state is not taken over",
        ),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(make_deployer(tmp_path), collate_fn, **{"loss_fn": loss_fn, "optimizer": optax.sgd(0.1), **settings})
