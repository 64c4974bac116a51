"""Programs in the form of redco's examples, each with the calls and the arguments that its family has.

Models and data are tiny. A program returns what its test compares.
"""

from __future__ import annotations

from collections import UserDict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core.frozen_dict import freeze
from flax.traverse_util import path_aware_map

import raysgd.functions as redco

VOCABULARY, WIDTH = 13, 8


class Model:
    """A model as transformers had them for flax: called with arrays by name and parameters."""

    def __call__(self, input_ids: Any, params: Any, dropout_rng: Any = None, train: bool = False, **others: Any) -> Any:
        hidden = params["embed"]["embedding"][input_ids]
        if train:
            hidden = hidden + 0.01 * jax.random.normal(dropout_rng, hidden.shape)
        return (hidden @ params["head"]["kernel"],)


def make_params(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    shapes = {"embed": {"embedding": (VOCABULARY, WIDTH)}, "head": {"kernel": (WIDTH, VOCABULARY)}}
    return jax.tree.map(
        lambda shape: generator.normal(0, 0.3, shape).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def make_examples(number: int, *, seed: int = 0) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    starts, lengths = generator.integers(0, VOCABULARY, number), generator.integers(2, 7, number)
    return [
        {"token_ids": [int(start + place) % VOCABULARY for place in range(length)]}
        for start, length in zip(starts, lengths, strict=True)
    ]


def tokenizer(rows: list[list[int]]) -> UserDict[str, Any]:
    """Pad to the longest row, and return an encoding that is a mapping of its own class, as tokenizers do."""
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return UserDict(input_ids=ids, attention_mask=mask)


def language_modeling(workdir: str, n_epochs: int, global_batch_size: int = 8, per_device_batch_size: int = 4) -> Any:
    """A causal language model: gradients are accumulated by optax, and a second call continues from the last checkpoint."""

    def collate_fn(tokenizer: Any, examples: Any) -> Any:
        batch = tokenizer([example["token_ids"] for example in examples])
        batch["labels"] = np.roll(batch["input_ids"], -1, axis=1)
        return batch

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        labels, weights = batch.pop("labels"), batch["attention_mask"]
        logits = state.apply_fn(**batch, params=params, dropout_rng=rng, train=is_training)[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    deployer = redco.Deployer(
        workdir=workdir,
        jax_seed=42,
        n_model_shards=1,
        n_processes=None,
        host0_address=None,
        host0_port=None,
        process_id=None,
        n_local_devices=None,
    )
    train_examples, eval_examples = make_examples(16), make_examples(4, seed=1)
    accumulate_grad_batches = deployer.get_accumulate_grad_batches(
        global_batch_size=global_batch_size, per_device_batch_size=per_device_batch_size
    )
    deployer.log_info(accumulate_grad_batches, title="accumulate_grad_batches")
    lr_schedule_fn = deployer.get_lr_schedule_fn(
        train_size=len(train_examples),
        per_device_batch_size=per_device_batch_size,
        n_epochs=2,
        learning_rate=0.05,
        schedule_type="linear",
        warmup_ratio=0.1,
    )
    optimizer = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate=lr_schedule_fn, weight_decay=0.01)),
        every_k_schedule=accumulate_grad_batches,
    )
    ckpt, info = deployer.load_last_ckpt(optimizer=optimizer, float_dtype=jnp.float32)
    if ckpt is None:
        deployer.save_ckpt(f"{workdir}_init", params=make_params(0))
        ckpt, info = deployer.load_ckpt(ckpt_dir=f"{workdir}_init", update_rng=False, float_dtype=jnp.float32)
    assert ckpt is not None
    params_sharding_rules = deployer.get_sharding_rules(params_shape_or_params=ckpt["params"])
    deployer.log_info(info="\n".join([str(t) for t in params_sharding_rules]), title="Sharding rules")
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=partial(collate_fn, tokenizer),
        apply_fn=Model(),
        loss_fn=loss_fn,
        params=ckpt.pop("params"),
        opt_state=ckpt.pop("opt_state"),
        params_sharded=True,
        opt_state_sharded=True,
        last_ckpt_info=info,
        optimizer=optimizer,
        compute_dtype=jnp.float32,
        lr_schedule_fn=lr_schedule_fn,
        accumulate_grad_batches=accumulate_grad_batches,
        params_sharding_rules=params_sharding_rules,
    )
    trainer.fit(
        train_examples=train_examples,
        eval_examples=eval_examples,
        n_epochs=n_epochs,
        per_device_batch_size=per_device_batch_size,
        save_last_ckpt=True,
    )
    return trainer.step, trainer.eval_loss(eval_examples, per_device_batch_size, desc="eval"), trainer.params


def lora(workdir: str) -> Any:
    """Low-rank updates of a frozen model: rules and optimizers for parts of the parameters."""

    def collate_fn(examples: Any) -> Any:
        return tokenizer([example["token_ids"] for example in examples])

    def aggregate(params: Any) -> Any:
        kernel = params["model"]["head"]["kernel"] + params["lora"]["a"] @ params["lora"]["b"]
        return {**params["model"], "head": {"kernel": kernel}}

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        logits = state.apply_fn(**batch, params=aggregate(params), dropout_rng=rng, train=is_training)[0]
        labels = jnp.roll(batch["input_ids"], -1, axis=1)
        return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels).mean()

    def pred_fn(rng: Any, params: Any, batch: Any, model: Any) -> Any:
        return model(batch["input_ids"], aggregate(params))[0].argmax(-1)

    def eval_acc(examples: Any, preds: Any) -> Any:
        return {"acc": np.mean([len(row) >= len(each["token_ids"]) for each, row in zip(examples, preds, strict=True)])}

    deployer = redco.Deployer(jax_seed=42, workdir=workdir, verbose=False)
    model = Model()
    noise = np.asarray(jax.random.normal(deployer.gen_rng(), (WIDTH, 2)))
    lora_params = {"a": noise, "b": np.zeros((2, VOCABULARY), np.float32)}
    params = {"model": make_params(0), "lora": lora_params}
    params_sharding_rules = {"model": deployer.get_sharding_rules(params["model"]), "lora": None}
    optimizer: Any = optax.MultiSteps(optax.adamw(0.05), every_k_schedule=2)
    optimizer = optax.multi_transform(
        transforms={"model": optax.set_to_zero(), "lora": optimizer},
        param_labels=path_aware_map(lambda path, _: path[0], params),
    )
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=collate_fn,
        apply_fn=model,
        loss_fn=loss_fn,
        params=params,
        optimizer=optimizer,
        accumulate_grad_batches=2,
        params_sharding_rules=params_sharding_rules,
    )
    predictor = redco.Predictor(
        deployer=deployer,
        collate_fn=collate_fn,
        pred_fn=partial(pred_fn, model=model),
        output_fn=lambda preds: preds.tolist(),
        params_sharding_rules=params_sharding_rules,
    )
    examples = make_examples(12)
    trainer.fit(
        train_examples=examples,
        per_device_batch_size=4,
        n_epochs=2,
        eval_examples=examples,
        eval_predictor=predictor,
        eval_metric_fn=eval_acc,
        save_argmax_ckpt_by_metrics=["acc"],
    )
    deployer.save_ckpt(f"{workdir}_lora", params=trainer.get_params_to_save()["lora"], float_dtype=jnp.float32)
    preds = predictor.predict(
        examples=examples,
        params=trainer.state.params,
        params_replicated=(trainer.mesh is None),
        params_sharded=(trainer.mesh is not None),
        per_device_batch_size=4,
    )
    return params, trainer.params, deployer.load_ckpt(f"{workdir}_lora")[0]["params"], examples, preds


def federated(num_rounds: int) -> Any:
    """Averages of parameters that clients train, each from those of the server."""

    def collate_fn(examples: Any) -> Any:
        return tokenizer([example["token_ids"][:2] for example in examples])

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        logits = state.apply_fn(batch["input_ids"][:, :1], params)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"][:, 1:]).mean()

    def pred_fn(rng: Any, params: Any, batch: Any, model: Any) -> Any:
        return model(batch["input_ids"][:, :1], params)[0][:, 0].argmax(-1)

    deployer = redco.Deployer(jax_seed=42, verbose=False)
    model, params = Model(), freeze(make_params(0))
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=collate_fn,
        apply_fn=model,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adam(learning_rate=0.0),
    )
    predictor = redco.Predictor(
        deployer=deployer,
        collate_fn=collate_fn,
        pred_fn=partial(pred_fn, model=model),
        output_fn=lambda x: x.tolist(),
    )
    clients = [make_examples(26, seed=seed) for seed in (3, 4)]
    for _ in range(num_rounds):
        summed = jax.tree_util.tree_map(jnp.zeros_like, params)
        for client in clients:
            trainer.set_train_state(apply_fn=model, params=params, optimizer=optax.adam(learning_rate=0.1), step=0)
            trainer.fit(train_examples=client, per_device_batch_size=13, n_epochs=4)
            summed = jax.tree_util.tree_map(lambda x, y: x + y, summed, trainer.params)
        params = jax.tree_util.tree_map(lambda x: x / len(clients), summed)
    test = make_examples(20, seed=5)
    preds = predictor.predict(examples=test, per_device_batch_size=10, params=params)
    return np.mean(np.array(preds) == np.array([example["token_ids"][1] for example in test]))


def private_step(
    rng: Any, state: Any, batch: Any, loss_fn: Any, lr_schedule_fn: Any, mesh: Any, compute_dtype: Any
) -> Any:
    """A step with the gradient of each row, for the devices of a pmap or for the parts of a mesh."""

    def loss_and_grads(rng_: Any, batch_: Any) -> Any:
        return jax.value_and_grad(
            lambda params: loss_fn(rng=rng_, state=state, params=params, batch=batch_, is_training=True)
        )(jax.tree.map(lambda x: x.astype(compute_dtype), state.params))

    def of_each_row(rng_: Any, batch_: Any) -> Any:
        rows = jax.tree.map(lambda x: x[:, None], batch_)
        loss, grads = jax.vmap(lambda row: loss_and_grads(rng_, row))(rows)
        return loss.mean(), grads

    if mesh is None:
        loss, grads = of_each_row(rng, batch)
        grads = jax.lax.pmean(grads, axis_name="dp")
    else:
        loss, grads = jax.vmap(of_each_row)(jax.random.split(rng, num=mesh.shape["dp"]), batch)
        loss, grads = jnp.mean(loss), jax.tree.map(lambda x: jnp.mean(x, axis=0), grads)
    new_state = state.apply_gradients(
        grads=jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
    )
    metrics = {"loss": loss, "step": state.step}
    return new_state, jax.lax.pmean(metrics, axis_name="dp") if mesh is None else metrics


def private(noise_multiplier: float) -> Any:
    """Training with differential privacy, by a step and an optimizer of its own."""

    def collate_fn(examples: Any) -> Any:
        return tokenizer([example["token_ids"][:2] for example in examples])

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        logits = state.apply_fn(batch["input_ids"][:, :1], params)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"][:, 1:]).mean()

    deployer = redco.Deployer(jax_seed=42, verbose=False)
    accumulate_grad_batches = deployer.get_accumulate_grad_batches(global_batch_size=8, per_device_batch_size=8)
    assert accumulate_grad_batches == 1
    optimizer = optax.chain(
        optax.contrib.differentially_private_aggregate(l2_norm_clip=1e6, noise_multiplier=noise_multiplier, key=42),
        optax.sgd(learning_rate=0.5),
    )
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=collate_fn,
        apply_fn=Model(),
        loss_fn=loss_fn,
        params=make_params(0),
        optimizer=optimizer,
        accumulate_grad_batches=accumulate_grad_batches,
        train_step_fn=private_step,
    )
    trainer.fit(train_examples=make_examples(24), per_device_batch_size=8, n_epochs=2)
    plain = redco.Trainer(deployer, collate_fn, Model(), loss_fn, make_params(0), optax.sgd(0.5))
    plain.fit(make_examples(24), 8, 2)
    return trainer.params, plain.params
