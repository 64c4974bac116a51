"""Programs with a step or a loop of their own. Each has the calls and arguments of its family in redco's examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fine_tuning import accuracy, image_batch, image_classes, image_loss, mnist
from flax import linen as nn
from flax.core.frozen_dict import freeze, unfreeze
from tiny_models import CNN, MLP, ROWS, TEST, TRAIN, Json


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


def private(redco: Any, devices: int, noise_multiplier: float = 0.0) -> list[float]:
    """Training with differential privacy, by a step and an optimizer of its own."""
    aggregate = optax.contrib.differentially_private_aggregate(
        l2_norm_clip=0.5, noise_multiplier=noise_multiplier, seed=42
    )
    return mnist(
        redco,
        devices,
        optimizer=optax.chain(aggregate, optax.adamw(learning_rate=0.01)),
        accumulate_grad_batches=1,
        train_step_fn=private_step,
    )


def federated(redco: Any, devices: int) -> list[float]:
    """Averages of parameters that clients train, each from those of the server."""
    deployer = redco.Deployer(jax_seed=42, verbose=False)
    model = CNN()
    params = freeze(model.init(deployer.gen_rng(), image_batch([TRAIN[0]])["images"])["params"])
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=image_batch,
        apply_fn=model.apply,
        loss_fn=image_loss,
        params=params,
        optimizer=optax.adam(learning_rate=0.0),
    )
    predictor = redco.Predictor(
        deployer=deployer,
        collate_fn=image_batch,
        pred_fn=partial(image_classes, model=model),
        output_fn=lambda x: x.tolist(),
    )
    rows, clients = ROWS // devices, [TRAIN, TEST]
    for _ in range(2):
        summed = jax.tree_util.tree_map(jnp.zeros_like, params)
        for client in clients:
            trainer.set_train_state(
                apply_fn=model.apply, params=params, optimizer=optax.adam(learning_rate=0.01), step=0
            )
            trainer.fit(train_examples=client, per_device_batch_size=rows, n_epochs=2)
            summed = jax.tree_util.tree_map(lambda x, y: x + y, summed, freeze(trainer.params))
        params = jax.tree_util.tree_map(lambda x: x / len(clients), summed)
    preds = predictor.predict(examples=TEST, per_device_batch_size=rows, params=params)
    return [trainer.eval_loss(TRAIN, rows), accuracy(TEST, preds)["acc"]]


def meta_learning(redco: Any, devices: int) -> list[float]:
    """Tasks in place of rows: a loss with steps of gradients in it, and examples of each epoch from a function."""

    def collate_fn(examples: Any) -> Any:
        return {
            split: {key: np.stack([each[split][key] for each in examples]) for key in examples[0][split]}
            for split in ("train", "val")
        }

    def inner_loss_fn(params: Any, batch: Any, model: Any) -> Any:
        logits = model.apply({"params": params}, batch["pixel_values"])
        return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["labels"]).mean()

    def adapt(params: Any, model: Any, batch: Any) -> Any:
        grads = jax.grad(inner_loss_fn)(params, batch, model)
        optimizer = optax.sgd(learning_rate=0.1)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool, model: Any) -> Any:
        def of_task(train: Any, val: Any) -> Any:
            return inner_loss_fn(adapt(params, model, train), val, model)

        return jax.vmap(of_task)(batch["train"], batch["val"]).mean()

    def pred_fn(rng: Any, batch: Any, params: Any, model: Any) -> Any:
        def of_task(train: Any, val: Any) -> Any:
            return model.apply({"params": adapt(params, model, train)}, val["pixel_values"]).argmax(axis=-1)

        return jax.vmap(of_task)(batch["train"], batch["val"])

    def metric_fn(preds: Any, examples: Any) -> Any:
        return {"acc": np.mean(np.array(preds) == np.array([each["val"]["labels"] for each in examples])).item()}

    def tasks(seed: int) -> list[Json]:
        generator = np.random.default_rng(seed)
        return [
            {
                split: {
                    "pixel_values": generator.random((4, 8, 8, 1)).astype(np.float32),
                    "labels": np.arange(4) % 2,
                }
                for split in ("train", "val")
            }
            for _ in range(ROWS)
        ]

    deployer = redco.Deployer(jax_seed=42, n_model_shards=1, verbose=False)
    model = CNN(features=2)
    params = model.init(deployer.gen_rng(), np.zeros((1, 8, 8, 1), np.float32))["params"]
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=collate_fn,
        apply_fn=model.apply,
        loss_fn=partial(loss_fn, model=model),
        params=params,
        optimizer=optax.adamw(learning_rate=0.01),
        params_sharding_rules=deployer.get_sharding_rules(params),
    )
    predictor = redco.Predictor(deployer=deployer, collate_fn=collate_fn, pred_fn=partial(pred_fn, model=model))
    rows = ROWS // devices
    trainer.fit(
        train_examples=lambda epoch_idx: tasks(epoch_idx),
        per_device_batch_size=rows,
        n_epochs=3,
        eval_examples=tasks(100),
        eval_loss=False,
        eval_predictor=predictor,
        eval_metric_fn=metric_fn,
    )
    return [trainer.eval_loss(tasks(0), rows), trainer.eval_loss(tasks(100), rows)]


def state_batch(examples: Any) -> Any:
    keys = ("states", "actions", "td_targets", "advantages", "log_probs0")
    return {key: np.stack([each[key] for each in examples]) for key in keys if key in examples[0]}


def ppo(redco: Any, devices: int) -> list[float]:
    """Proximal policy optimization: two trainers, whose predictions make the examples of each training."""

    def actor_loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool, epsilon: float) -> Any:
        log_probs = nn.log_softmax(state.apply_fn({"params": params}, batch["states"]))
        log_probs = jnp.take_along_axis(log_probs, batch["actions"][..., None], axis=-1)[..., 0]
        ratio = jnp.exp(log_probs - batch["log_probs0"])
        clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
        return -jnp.mean(jnp.minimum(ratio * batch["advantages"], clipped * batch["advantages"]))

    def critic_loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        values = state.apply_fn({"params": params}, batch["states"])[:, 0]
        return jnp.mean(jnp.square(values - batch["td_targets"]))

    def pred_fn(rng: Any, batch: Any, params: Any, model: Any) -> Any:
        return model.apply({"params": params}, batch["states"])

    deployer = redco.Deployer(jax_seed=42, verbose=False)

    def make(model: Any, loss_fn: Any, output_fn: Any) -> Any:
        params = model.init(deployer.gen_rng(), jnp.zeros((1, 3)))["params"]
        trainer = redco.Trainer(
            deployer=deployer,
            collate_fn=state_batch,
            apply_fn=model.apply,
            loss_fn=loss_fn,
            params=params,
            optimizer=optax.adam(learning_rate=0.01),
        )
        predict = redco.Predictor(
            deployer=deployer, collate_fn=state_batch, pred_fn=partial(pred_fn, model=model), output_fn=output_fn
        ).predict
        return trainer, predict

    actor, predict_logits = make(MLP(3), partial(actor_loss_fn, epsilon=0.2), None)
    critic, predict_values = make(MLP(1), critic_loss_fn, lambda output: output[:, 0].tolist())
    generator, rows = np.random.default_rng(0), ROWS // devices
    for _ in range(2):
        path = generator.normal(size=(ROWS + 1, 3)).astype(np.float32)
        states = [{"states": state} for state in path]
        log_probs = np.log(jax.nn.softmax(np.stack(predict_logits(states[:-1], rows, actor.params)), axis=-1))
        values = predict_values(states, rows, critic.params)
        examples = []
        for number in range(ROWS):
            action, reward = int(generator.integers(3)), float(path[number].sum())
            target = reward + 0.98 * values[number + 1]
            examples.append(
                {
                    "states": path[number],
                    "actions": action,
                    "td_targets": target,
                    "advantages": target - values[number],
                    "log_probs0": log_probs[number][action],
                }
            )
        actor.fit(train_examples=examples, per_device_batch_size=rows, n_epochs=2)
        critic.fit(train_examples=examples, per_device_batch_size=rows, n_epochs=2)
    return [actor.eval_loss(examples, rows), critic.eval_loss(examples, rows)]


def ddpg(redco: Any, devices: int) -> list[float]:
    """Deep deterministic policy gradients: one update at a time from a buffer, towards parameters that follow slowly."""
    actor, critic = MLP(1), MLP(1)

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        values = critic.apply({"params": params["critic"]}, batch["states"], batch["actions"])[:, 0]
        actions = nn.tanh(actor.apply({"params": params["actor"]}, batch["states"]))
        frozen = jax.lax.stop_gradient(params["critic"])
        value = jnp.mean(critic.apply({"params": frozen}, batch["states"], actions))
        return jnp.mean(jnp.square(values - batch["td_targets"])) * 10 - value

    def actor_pred_fn(rng: Any, batch: Any, params: Any) -> Any:
        return nn.tanh(actor.apply({"params": params}, batch["states"]))

    def critic_pred_fn(rng: Any, batch: Any, params: Any) -> Any:
        return critic.apply({"params": params}, batch["states"], batch["actions"])[:, 0]

    deployer = redco.Deployer(jax_seed=42, verbose=False)
    targets: Any = {
        "critic": critic.init(deployer.gen_rng(), jnp.zeros((1, 3)), jnp.zeros((1, 1)))["params"],
        "actor": actor.init(deployer.gen_rng(), jnp.zeros((1, 3)))["params"],
    }
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=state_batch,
        apply_fn=lambda: None,
        loss_fn=loss_fn,
        params=targets,
        optimizer=optax.adam(learning_rate=0.01),
    )
    predict_actions = redco.Predictor(deployer, state_batch, actor_pred_fn).predict
    predict_values = redco.Predictor(deployer, state_batch, critic_pred_fn).predict
    generator, rows = np.random.default_rng(0), ROWS // devices
    assert deployer.get_local_global_micro_batch_size(per_device_batch_size=rows)[1] == ROWS
    for _ in range(3):
        action = predict_actions(
            [{"states": np.ones(3, np.float32)}], params=trainer.params["actor"], per_device_batch_size=1
        )
        states = generator.normal(size=(ROWS, 3)).astype(np.float32)
        actions = next_actions = predict_actions([{"states": each} for each in states], rows, targets["actor"])
        inputs = [{"states": one, "actions": two} for one, two in zip(states, next_actions, strict=True)]
        next_values = predict_values(inputs, rows, targets["critic"])
        examples = [
            {"states": state, "actions": own, "td_targets": np.float32(state.sum() + action[0][0] + 0.98 * value)}
            for state, own, value in zip(states, actions, next_values, strict=True)
        ]
        trainer.train(examples=examples, per_device_batch_size=rows)
        targets = jax.tree_util.tree_map(lambda x, y: 0.9 * x + 0.1 * y, unfreeze(targets), unfreeze(trainer.params))
    return [trainer.eval_loss(examples, rows)]
