"""The compiled steps on 8 virtual devices: equal losses and updates on every mesh, sharded states, collectives, compilations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.errors import ConfigError

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
nn = pytest.importorskip("flax.linen")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from raysgd.functions.sharding import ShardingRules, plan_sharding  # noqa: E402
from raysgd.functions.worker import train_state  # noqa: E402
from raysgd.functions.worker.random_rows import key_of_rows  # noqa: E402
from raysgd.functions.worker.steps import Steps, mesh_of  # noqa: E402
from support import functions_models as models  # noqa: E402
from support.jax_devices import cpu_devices  # noqa: E402

MLP = models.Mlp((48, 4))
VOCABULARY = 97  # does not divide
RANDOM = np.random.default_rng(0)
ROWS = {
    "x": RANDOM.normal(size=(16, 20)).astype(np.float32),
    "y": RANDOM.integers(0, 4, 16),
    "mask": (RANDOM.random(16) < 0.6),
}
TEXTS = {
    "ids": RANDOM.integers(0, VOCABULARY, (16, models.LENGTH)),
    "mask": RANDOM.random((16, models.LENGTH)) < np.linspace(0.1, 0.9, 16)[:, None],
}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 4)


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> Iterator[None]:
    with cpu_devices(8):
        yield


@pytest.fixture(scope="module")
def mlp() -> Any:
    return init(MLP, ROWS["x"])


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return init(models.Gpt2(VOCABULARY, layers=1), models.IDS)


def init(module: Any, *inputs: Any) -> Any:
    generator = np.random.default_rng(0)
    shapes = models.shapes(module, *inputs)
    return jax.tree.map(lambda leaf: generator.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)


def mean_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    logits = MLP.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def masked_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    logits = MLP.apply({"params": params}, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def token_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    logits = models.Gpt2(VOCABULARY, layers=1).apply({"params": params}, batch["ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
    return (losses * batch["mask"][:, 1:]).sum(), batch["mask"][:, 1:].sum()


@pytest.fixture(autouse=True)
def state_of_small_models_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_state, "MIN_SHARDED_BYTES", 0)


def steps_for(params: Any, shards: int = 1, **settings: Any) -> Steps:
    mesh = mesh_of(shards)
    return Steps(mesh, plan_sharding(params, mesh.shape), **settings)


def train(
    params: Any, batch: Any, shards: int = 1, num_steps: int = 3, **settings: Any
) -> tuple[list[Any], Any, Steps]:
    steps = steps_for(params, shards, **{"optimizer": optax.sgd(SCHEDULE), "lr_schedule_fn": SCHEDULE} | settings)
    state = steps.make_state(params, 0)
    metrics = []
    for _ in range(num_steps):
        state, found = steps.train(state, steps.place_batch(batch))
        metrics.append({name: float(value) for name, value in found.items()})
    return metrics, state, steps


def check_equal(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    for one, other in zip(first[0], second[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), first[1].params, second[1].params)


# ----------------------------------------------------------------------------------------------- equal on every mesh


@pytest.mark.parametrize(
    ("loss_fn", "meshes"), [(mean_loss, [(1, None), (2, 2), (4, 4)]), (masked_loss, [(1, 2), (2, 4), (4, None)])]
)
def test_losses_and_updates_are_those_of_plain_jax_on_every_mesh(mlp: Any, loss_fn: Any, meshes: Any) -> None:
    expected_losses, params = [], mlp
    optimizer = optax.adamw(SCHEDULE)
    opt_state = optimizer.init(params)

    def mean_of(params: Any) -> Any:
        returned = loss_fn(None, None, params, ROWS, True)
        return returned[0] / returned[1] if isinstance(returned, tuple) else returned

    @jax.jit
    def update(params: Any, opt_state: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    for _ in range(3):
        loss, params, opt_state = update(params, opt_state)
        expected_losses.append(float(loss))
    for shards, accumulate in meshes:
        settings = {"loss_fn": loss_fn, "optimizer": optimizer, "accumulate_grad_batches": accumulate}
        metrics, state, _ = train(mlp, ROWS, shards, **settings)
        assert [each["loss"] for each in metrics] == pytest.approx(expected_losses, abs=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, params)
        assert {each["weight"] for each in metrics} == {16.0 if loss_fn is mean_loss else float(ROWS["mask"].sum())}


def test_language_model_with_masked_tokens_is_equal_on_every_mesh(gpt2: Any) -> None:
    settings = {
        "loss_fn": token_loss,
        "optimizer": optax.sgd(SCHEDULE),
    }  # Adam scales the zero gradients of keys' biases
    first = train(gpt2, TEXTS, 1, 2, **settings)
    check_equal(first, train(gpt2, TEXTS, 4, 2, accumulate_grad_batches=2, **settings))


@pytest.mark.parametrize("rows", [11, 1])
def test_tails_count_each_row_once(mlp: Any, rows: int) -> None:
    tail = {name: array[:rows] for name, array in ROWS.items()}
    first = train(mlp, tail, 1, 2, loss_fn=mean_loss)
    assert first[0][0]["weight"] == rows
    check_equal(first, train(mlp, tail, 2, 2, loss_fn=mean_loss, accumulate_grad_batches=4))


def test_parameters_of_half_precision_are_trained_with_sums_in_full_precision(mlp: Any) -> None:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), mlp)
    metrics, state, _ = train(half, ROWS, 2, 2, loss_fn=mean_loss, accumulate_grad_batches=2)
    whole, _, _ = train(mlp, ROWS, 2, 2, loss_fn=mean_loss, accumulate_grad_batches=2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert metrics[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=0.02)
    assert metrics[1]["loss"] == pytest.approx(whole[1]["loss"], rel=0.05)


def test_random_numbers_do_not_depend_on_the_mesh_and_change_with_each_step(mlp: Any) -> None:
    def noise(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        return (jax.random.normal(train_rng, (16,)) * batch["y"]).mean() + 0 * params["Dense_0"]["bias"].sum()

    losses = [[each["loss"] for each in train(mlp, ROWS, shards, loss_fn=noise)[0]] for shards in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(set(losses[0])) == 3


def random_loss(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    """Draw for rows, for each row by a key of its own, for parameters, and one number for all."""
    rows = len(batch["y"])
    (dropout, own), (weights, one) = map(jax.random.split, jax.random.split(train_rng))
    x = batch["x"] * jax.random.bernoulli(dropout, 0.7, batch["x"].shape)
    x += jax.vmap(lambda key: 0.1 * jax.random.normal(key, (20,)))(jax.random.split(own, rows))
    noise = jax.random.normal(jax.random.fold_in(weights, 1), (7, 3))  # no part has 7 or 3 rows
    loss = mean_loss(train_rng, state, params, {**batch, "x": x}, is_training)
    return loss * jax.random.uniform(one) + params["Dense_1"]["bias"].sum() * noise.sum()


def test_random_numbers_of_a_row_do_not_depend_on_the_parts_of_its_batch(mlp: Any) -> None:
    expected = train(mlp, ROWS, 1, loss_fn=random_loss)
    for shards, accumulate, rows in ((4, 3, 16), (2, 2, 11)):  # 3 parts are of 6, 6 and 4 rows
        batch = {name: array[:rows] for name, array in ROWS.items()}
        first = expected if rows == 16 else train(mlp, batch, 1, loss_fn=random_loss)
        check_equal(first, train(mlp, batch, shards, loss_fn=random_loss, accumulate_grad_batches=accumulate))


@pytest.mark.parametrize("num_devices", [4, 2])
def test_smaller_group_draws_the_random_numbers_of_the_largest_one(mlp: Any, num_devices: int) -> None:
    rows = {name: np.concatenate([array] * 4) for name, array in ROWS.items()}  # 8 rows for each of 8 devices
    whole = train(mlp, rows, 1, loss_fn=random_loss)
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(-1, 1), ("data", "model"))
    steps = Steps(
        mesh,
        plan_sharding(mlp, mesh.shape),
        loss_fn=random_loss,
        optimizer=optax.sgd(SCHEDULE),
        lr_schedule_fn=SCHEDULE,
        accumulate_grad_batches=8 // num_devices,
    )
    state, metrics = steps.make_state(mlp, 0), []
    for _ in range(3):
        state, found = steps.train(state, steps.place_batch(rows))
        metrics.append({name: float(value) for name, value in found.items()})
    check_equal(whole, (metrics, state))


def test_key_of_a_whole_batch_draws_what_a_plain_key_draws() -> None:
    plain = jax.random.key(3)
    key = key_of_rows(jax.random.PRNGKey(3), 0, stride=1, num_rows=6, num_all=6)

    def draw(key: Any) -> Any:
        one, other = jax.random.split(key)
        return (
            jax.random.normal(one, (6, 5, 2)),
            jax.random.randint(other, (6,), 0, 100, jnp.uint8),
            jax.random.uniform(key, (6, 3), jnp.bfloat16),
            jax.random.permutation(one, 12),
            jax.random.categorical(other, jnp.zeros((6, 9))),
            jax.vmap(lambda key: jax.random.normal(key, (6,)))(jax.random.split(key, 6)),
            jax.random.normal(jax.random.fold_in(key, 2)),
        )

    jax.tree.map(np.testing.assert_array_equal, jax.jit(draw)(key), jax.jit(draw)(plain))


def test_parts_of_a_batch_draw_independent_numbers_for_other_shapes() -> None:
    keys = [key_of_rows(jax.random.PRNGKey(3), first, stride=2, num_rows=4, num_all=8) for first in (0, 1)]
    # Rows that are not the first dimension, and flattened ones, must not be the same in both parts.
    for shape in ((3, 4), (12,), (5, 8, 2)):
        assert not np.allclose(*[jax.random.normal(key, shape) for key in keys])
    np.testing.assert_array_equal(*[jax.random.normal(key, (7, 5)) for key in keys])


def test_other_generators_have_keys_for_each_part() -> None:
    with jax.default_prng_impl("rbg"):
        key = jax.random.PRNGKey(3)
        keys = [key_of_rows(key, first, stride=2, num_rows=4, num_all=8) for first in (0, 1)]
        assert keys[0].tolist() == key.tolist() != keys[1].tolist()
        assert not np.allclose(*[jax.random.normal(each, (4,)) for each in keys])


def test_training_continues_on_another_mesh_from_a_checkpoint(mlp: Any, tmp_path: Path) -> None:
    settings = {"loss_fn": mean_loss, "optimizer": optax.sgd(SCHEDULE, momentum=0.9)}
    _, state, _ = train(mlp, ROWS, 2, 3, **settings)
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint(state, all_ranks=True)
        saved = raysgd.load_checkpoint()
    steps = steps_for(mlp, 4, **settings)
    restored = raysgd.jax.restore(saved, like=steps.state_like)
    assert int(restored.step) == 3 and restored.rng.tolist() == state.rng.tolist()
    metrics = steps.train(restored, steps.place_batch(ROWS))[1]
    assert float(metrics["loss"]) == pytest.approx(train(mlp, ROWS, 2, 4, **settings)[0][3]["loss"], abs=1e-5)


# ------------------------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("accumulate", [1, 4])
def test_reported_learning_rate_is_the_applied_one(mlp: Any, accumulate: int) -> None:
    steps = steps_for(
        mlp,
        2,
        loss_fn=lambda rng, state, params, batch, is_training: sum(leaf.sum() for leaf in jax.tree.leaves(params)),
        optimizer=optax.sgd(SCHEDULE),
        lr_schedule_fn=SCHEDULE,
        accumulate_grad_batches=accumulate,
    )
    state = steps.make_state(mlp, 0)
    applied, reported = [], []
    for number in range(1, 6):
        before = np.array(state.params["Dense_0"]["bias"])
        state, metrics = steps.train(state, steps.place_batch(ROWS))
        applied.append(float((before - np.array(state.params["Dense_0"]["bias"])).mean()))  # every gradient is 1
        reported.append(float(metrics["learning_rate"]))
        assert int(metrics["step"]) == int(state.step) == number
        num_params = sum(leaf.size for leaf in jax.tree.leaves(mlp))
        assert float(metrics["grad_norm"]) == pytest.approx(num_params**0.5, rel=1e-5)
    assert applied == pytest.approx(reported, abs=1e-6)
    assert reported == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])


def test_batch_in_which_nothing_counts_changes_nothing(mlp: Any) -> None:
    nothing = ROWS | {"mask": np.zeros(16, bool)}
    metrics, state, _ = train(mlp, nothing, 2, 1, loss_fn=masked_loss)
    assert (metrics[0]["loss"], metrics[0]["grad_norm"], metrics[0]["weight"]) == (0, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, state.params, mlp)


def test_loss_of_evaluation_is_a_sum_with_its_weight(mlp: Any) -> None:
    seen = []

    def loss_fn(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        seen.append((is_training, state.apply_fn))
        return masked_loss(train_rng, state, params, batch, is_training)

    steps = steps_for(mlp, 2, loss_fn=loss_fn, optimizer=optax.sgd(0.1), apply_fn=len)
    state = steps.make_state(mlp, 0)
    parts = [{name: array[part] for name, array in ROWS.items()} for part in (slice(0, 8), slice(8, 16))]
    sums = np.array([steps.eval_loss(state, steps.place_batch(part)) for part in [*parts, ROWS]])
    np.testing.assert_allclose(sums[0] + sums[1], sums[2], rtol=1e-5)
    assert sums[2][1] == ROWS["mask"].sum() and set(seen) == {(False, len)}


def test_predictions_are_equal_on_every_mesh_and_whole(gpt2: Any) -> None:
    def pred_fn(pred_rng: Any, params: Any, batch: Any) -> Any:
        logits = models.Gpt2(VOCABULARY, layers=1).apply({"params": params}, batch["ids"])
        return {"best": logits.argmax(-1), "noise": jax.random.normal(pred_rng, (len(logits),))}

    found = []
    for shards in (1, 2):
        steps = steps_for(gpt2, shards, pred_fn=pred_fn)
        preds = steps.predict(jax.random.PRNGKey(1), steps.place_params(gpt2), steps.place_batch(TEXTS))
        assert preds["best"].sharding.is_fully_replicated
        found.append(jax.tree.map(np.array, preds))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0]["best"].shape == TEXTS["ids"].shape


def test_nnx_model_is_trained_and_saved(tmp_path: Path) -> None:
    abstract = nnx.eval_shape(lambda: models.NnxTransformer(nnx.Rngs(0), layers=1))  # no array is made one by one
    graph, shapes = nnx.split(abstract, nnx.Param)
    params = jax.tree.map(lambda leaf: RANDOM.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)

    def loss_fn(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        logits = nnx.merge(graph, params)(batch["ids"] % models.VOCABULARY)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"] % models.VOCABULARY)
        return losses.mean()

    expected = float(jax.jit(lambda params: loss_fn(None, None, params, TEXTS, True))(params))
    metrics, state, steps = train(params, TEXTS, 2, 2, loss_fn=loss_fn)
    assert metrics[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics[1]["loss"] < metrics[0]["loss"]
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint(state)
        restored = raysgd.jax.restore(raysgd.load_checkpoint(), like=steps.state_like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert state.params["blocks"][0]["up"]["kernel"].get_value().sharding.spec == P(None, "model")


# ------------------------------------------------------------------------------------------------------------ shardings


def test_state_of_the_optimizer_is_sharded_as_parameters_and_along_data(mlp: Any) -> None:
    _, state, steps = train(mlp, ROWS, 2, 1, loss_fn=mean_loss, optimizer=optax.adam(0.1))
    adam = state.opt_state[0]
    for moments in (adam.mu, adam.nu):
        assert moments["Dense_0"]["kernel"].sharding.spec == P("data", "model")
        assert moments["Dense_1"]["kernel"].sharding.spec == P("model", "data")
        assert moments["Dense_1"]["bias"].sharding.spec == P("data")
        assert moments["Dense_0"]["bias"].sharding.spec == P(("model", "data"))
    assert adam.count.sharding.is_fully_replicated
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((adam.mu, adam.nu)))
    assert local <= 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(mlp)) / 8 * 1.02
    like = jax.tree.leaves(steps.state_like)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == [leaf.sharding for leaf in like]
    assert state.params["Dense_0"]["kernel"].sharding.spec == P(None, "model")


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.adafactor(0.1, min_dim_size_to_factor=8)),
        optax.masked(optax.adam(0.1), lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9)),  # takes the loss
    ],
    ids=["adafactor", "masked", "plateau"],
)
def test_other_optimizers_are_sharded_too_and_compute_the_same(mlp: Any, optimizer: Any) -> None:
    settings = {"loss_fn": mean_loss, "optimizer": optimizer, "lr_schedule_fn": None}
    check_equal(train(mlp, ROWS, 1, 2, **settings), train(mlp, ROWS, 4, 2, **settings))


def test_old_state_is_donated(mlp: Any) -> None:
    steps = steps_for(mlp, 2, loss_fn=mean_loss, optimizer=optax.sgd(0.1))
    state = steps.make_state(mlp, 0)
    old = jax.tree.leaves(state.params)
    steps.train(state, steps.place_batch(ROWS))
    assert all(leaf.is_deleted() for leaf in old)
    assert mlp["Dense_0"]["kernel"].any()  # the caller's arrays stay


def test_each_shape_of_a_batch_is_compiled_once(mlp: Any) -> None:
    steps = steps_for(mlp, 2, loss_fn=mean_loss, optimizer=optax.sgd(0.1))
    state = steps.make_state(mlp, 0)
    for rows in (16, 16, 11, 16, 11):
        batch = steps.place_batch({name: array[:rows] for name, array in ROWS.items()})
        state, _ = steps.train(state, batch)
        steps.eval_loss(state, batch)
    assert steps.num_compilations == {"train": 2, "eval_loss": 2, "predict": 0}
    assert steps._train._jitted._cache_size() == 2


# ---------------------------------------------------------------------------------------------------------- collectives

#: For each family: the model, where its block is in the tree of parameters, the block, and its all-reduces.
BLOCKS: dict[str, tuple[Any, int, tuple[str, ...], Any, int]] = {
    "gpt2": (models.Gpt2(layers=1), 1, ("h", "0"), models.Gpt2Block(), 2),
    "llama": (models.Llama(layers=1), 1, ("layers_0",), models.LlamaBlock(), 2),
    "llama with grouped queries": (models.Llama(2, layers=1), 1, ("layers_0",), models.LlamaBlock(2), 2),
    "bert": (models.Bert(layers=1), 1, ("layer", "0"), models.BertLayer(), 2),
    "t5 encoder": (models.T5(1), 2, ("encoder_0",), models.T5Block(False, True), 2),
    "t5 decoder": (models.T5(1), 2, ("decoder_0",), models.T5Block(True, True), 3),
}


def collectives_of(steps: Steps, batch: Any) -> Counter[str]:
    return collectives_in(steps.lower_predict(batch))


def collectives_in(lowered: Any) -> Counter[str]:
    text = lowered.compile().as_text()
    return Counter(re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", text))


def test_step_of_a_small_model_has_one_all_reduce_and_computes_what_a_sharded_state_does(
    mlp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"loss_fn": mean_loss, "optimizer": optax.adam(0.1), "lr_schedule_fn": None}
    sharded = train(mlp, ROWS, **settings)
    assert collectives_in(sharded[2].lower_train(ROWS))["all-gather"] >= 3
    monkeypatch.undo()
    whole = train(mlp, ROWS, **settings)
    assert collectives_in(whole[2].lower_train(ROWS)) == {"all-reduce": 1}
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(whole[1]))
    check_equal(whole, sharded)


def test_state_of_a_large_optimizer_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    params = {"kernel": jax.ShapeDtypeStruct((1024, 2048), np.float32)}  # Adam: twice 8 MiB
    like = steps_for(params, optimizer=optax.adam(0.1)).state_like
    assert like.opt_state[0].mu["kernel"].sharding.spec == P(None, "data")


@pytest.mark.parametrize("name", BLOCKS)
def test_forward_pass_of_a_block_has_two_all_reduces_and_three_with_cross_attention(name: str) -> None:
    model, num_ids, place, block, expected = BLOCKS[name]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    rules = ShardingRules(plan_sharding(models.shapes(model, *[models.IDS] * num_ids), mesh.shape))
    inputs = [np.zeros((4, models.LENGTH, models.WIDTH), np.float32)] * num_ids
    params = models.shapes(block, *inputs)
    below = "/".join(place) + "/"
    own = [
        (rule.replace(re.escape(below), "", 1), spec) for rule, spec in rules if rule.startswith(f"^{re.escape(below)}")
    ]
    plan = plan_sharding(params, mesh.shape, own)
    assert len(own) == len(plan.parameters)

    steps = Steps(mesh, plan, pred_fn=lambda rng, params, batch: block.apply({"params": params}, *batch.values()))
    found = collectives_of(steps, dict(enumerate(inputs)))
    if name == "gpt2":
        assert found.pop("collective-permute") == 2  # query, key and value of each device's heads
    assert found == {"all-reduce": expected}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (models.Mlp((48, 24, 48, 8)), np.zeros((4, 20), np.float32)),
        (models.Cnn(), np.zeros((4, 8, 8, 3), np.float32)),
    ],
    ids=["MLP", "CNN"],
)
def test_four_numbered_layers_have_two_all_reduces(model: Any, inputs: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    plan = plan_sharding(models.shapes(model, inputs), mesh.shape)
    steps = Steps(mesh, plan, pred_fn=lambda rng, params, batch: model.apply({"params": params}, batch))
    assert collectives_of(steps, inputs) == {"all-reduce": 2}


@pytest.mark.parametrize(
    ("make", "batch", "shards"),
    [
        (lambda layers: models.Gpt2(VOCABULARY, layers=layers), models.IDS, 2),
        (models.VisionTransformer, np.zeros((4, 8, 8, 3), np.float32), 2),
        (models.VisionTransformer, np.zeros((4, 8, 8, 3), np.float32), 4),
    ],
    ids=["a vocabulary that does not divide", "patches and positions", "10 classes that do not divide"],
)
def test_shardings_of_embeddings_and_outputs_do_not_spread_to_blocks(make: Any, batch: Any, shards: int) -> None:
    found = []
    for layers in (1, 2):
        module = make(layers)
        steps = steps_for(
            models.shapes(module, batch),
            shards,
            pred_fn=lambda rng, params, batch, m=module: m.apply({"params": params}, batch),
        )
        found.append(collectives_of(steps, batch))
    assert found[1]["all-reduce"] - found[0]["all-reduce"] == 2
    assert found[1]["all-gather"] == found[0]["all-gather"]


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda batch: batch["x"][:3].sum(axis=1),
            r"loss_fn returned an array of shape \(3,\)\. Return a scalar, the mean",
        ),
        (lambda batch: (batch["x"].sum(), 1.0, 2.0), "loss_fn returned a tuple of 3 values"),
        (lambda batch: (batch["x"].sum(), batch["mask"]), r"an array of shape \(16,\)"),
        (lambda batch: {"loss": batch["x"].sum()}, "a value of type dict"),
        (lambda batch: None, "a value of type NoneType"),
        (lambda batch: batch["y"].sum(), "a loss of dtype int32, which has no gradient"),
    ],
)
def test_loss_that_is_neither_of_the_batch_nor_of_its_rows_is_refused(mlp: Any, returned: Any, message: str) -> None:
    steps = steps_for(
        mlp, loss_fn=lambda rng, state, params, batch, is_training: returned(batch), optimizer=optax.sgd(0.1)
    )
    with pytest.raises(ConfigError, match=message):
        steps.train(steps.make_state(mlp, 0), steps.place_batch(ROWS))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (16, "n_model_shards=16 is more than the 8 devices of all workers: give one of 1, 2, 4, 8"),
        (3, "n_model_shards=3 does not divide the 8 devices"),
        (0, "n_model_shards=0 is too small"),
    ],
)
def test_model_shards_that_do_not_fit_the_devices_are_refused(shards: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mesh_of(shards)


def test_batches_that_cannot_work_are_refused(mlp: Any) -> None:
    steps = steps_for(mlp, loss_fn=mean_loss)
    with pytest.raises(ConfigError, match="no training state without an optimizer"):
        steps.make_state(mlp, 0)
    with pytest.raises(ConfigError, match=r"numbers of rows: \['x'\] of 3, \['y'\] of 2"):
        steps.place_batch({"x": np.zeros((3, 2)), "y": np.zeros(2)})
    with pytest.raises(ConfigError, match=r"\['x'\] of a scalar"):
        steps.place_batch({"x": 1.0})
    with pytest.raises(ConfigError, match=r"\['x'\] of 0"):
        steps.place_batch({"x": np.zeros((0, 2))})
    with pytest.raises(ConfigError, match="collate_fn returned 3 rows for 4 examples"):
        steps.place_batch({"x": np.zeros((3, 2))}, num_rows=4)
    with pytest.raises(ConfigError, match=r"\['text'\] of dtype <U1: return arrays of numbers"):
        steps.place_batch({"text": np.array(["a"])})
    with pytest.raises(ConfigError, match="accumulate_grad_batches=0"):
        steps_for(mlp, accumulate_grad_batches=0)
    with pytest.raises(ConfigError, match="The plan is for a mesh of"):
        Steps(mesh_of(2), plan_sharding(mlp, {"data": 8, "model": 1}))


# ------------------------------------------------------------------------------------------- settings in the state


def test_hyperparameters_that_the_program_gives_differently_count(mlp: Any) -> None:
    def steps_with(rate: float, decay: float) -> Steps:
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.inject_hyperparams(optax.adamw)(learning_rate=rate, weight_decay=decay),
        )
        return steps_for(mlp, loss_fn=mean_loss, optimizer=optimizer)

    def settings_of(state: Any) -> tuple[float, float]:
        values = state.opt_state[1].hyperparams
        return float(values["learning_rate"]), float(values["weight_decay"])

    first = steps_with(0.1, 0.01)
    state, _ = first.train(first.make_state(mlp, 0), first.place_batch(ROWS))
    state.opt_state[1].hyperparams["weight_decay"] = (
        state.opt_state[1].hyperparams["weight_decay"] * 2
    )  # as a loop does
    saved, given = state.state_dict(), first.given_hyperparameters
    moments = np.asarray(jax.tree.leaves(state.opt_state[1].inner_state)[1])

    assert settings_of(steps_with(0.1, 0.01).restore_state(saved, given)) == pytest.approx((0.1, 0.02))
    resumed = steps_with(0.001, 0.01)
    restored = resumed.restore_state(saved, given)
    assert settings_of(restored) == pytest.approx((0.001, 0.02))
    np.testing.assert_array_equal(jax.tree.leaves(restored.opt_state[1].inner_state)[1], moments)
    restored, _ = resumed.train(restored, resumed.place_batch(ROWS))
    assert settings_of(restored) == pytest.approx((0.001, 0.02))


def test_optimizer_without_injected_settings_has_no_hyperparameters(mlp: Any) -> None:
    assert steps_for(mlp, loss_fn=mean_loss, optimizer=optax.adamw(0.1)).given_hyperparameters == {}
