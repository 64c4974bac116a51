"""Programs that call fit once: images, texts, sequences. Each has the calls and arguments of its family in redco's examples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core.frozen_dict import freeze, unfreeze
from flax.traverse_util import path_aware_map
from tiny_models import CNN, MLP, ROWS, TEST, TRAIN, VOCABULARY, WIDTH, Model, tokenizer


def image_batch(examples: Any) -> Any:
    images = np.stack([np.array(example["image"])[:, :, None] for example in examples])
    return {"images": images, "labels": np.array([example["label"] for example in examples])}


def image_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    logits = state.apply_fn({"params": params}, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["labels"]).mean()


def image_classes(rng: Any, params: Any, batch: Any, model: Any) -> Any:
    return model.apply({"params": params}, batch["images"]).argmax(axis=-1)


def accuracy(examples: Any, preds: Any) -> Any:
    labels = np.array([example["label"] for example in examples])
    return {"acc": np.mean(np.array(preds) == labels).item()}


def mnist(redco: Any, devices: int, *, shards: int = 1, **trainer_arguments: Any) -> list[float]:
    """Classes of images: evaluation with a predictor and a metric."""
    deployer = redco.Deployer(jax_seed=42, n_model_shards=shards, verbose=False)
    model = CNN()
    params = model.init(deployer.gen_rng(), image_batch(examples=[TRAIN[0]])["images"])["params"]
    rules = deployer.get_sharding_rules(params_shape_or_params=params)
    if rules is not None:
        deployer.log_info(info="\n".join([str(t) for t in rules]), title="Sharding rules")
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=image_batch,
        apply_fn=model.apply,
        loss_fn=image_loss,
        params=params,
        params_sharding_rules=rules,
        **{"optimizer": optax.adamw(learning_rate=0.01), **trainer_arguments},
    )
    predictor = redco.Predictor(
        deployer=deployer,
        collate_fn=image_batch,
        pred_fn=partial(image_classes, model=model),
        params_sharding_rules=rules,
    )
    rows = ROWS * shards // devices
    trainer.fit(
        train_examples=TRAIN,
        per_device_batch_size=rows,
        n_epochs=3,
        eval_examples=TEST,
        eval_predictor=predictor,
        eval_metric_fn=accuracy,
    )
    return [trainer.eval_loss(TRAIN, rows), trainer.eval_loss(TEST, rows)]


def classification(redco: Any, devices: int, *, is_regression: bool = False) -> list[float]:
    """Classes or numbers for texts: a checkpoint to begin with, and gradients that optax accumulates."""

    def collate_fn(examples: Any, tokenizer: Any, label_key: str) -> Any:
        batch = tokenizer([example["src"] for example in examples])
        batch["labels"] = np.array([example[label_key] for example in examples])
        return batch

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool, is_regression: bool) -> Any:
        labels = batch.pop("labels")
        logits = state.apply_fn(**batch, params=params, dropout_rng=rng, train=is_training).logits
        if is_regression:
            return jnp.mean(jnp.square(logits[..., 0] - labels))
        return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels).mean()

    def pred_fn(rng: Any, params: Any, batch: Any, model: Any, is_regression: bool) -> Any:
        batch.pop("labels")
        logits = model(**batch, params=params, train=False).logits
        return logits[..., 0] if is_regression else logits.argmax(axis=-1)

    def metric_fn(examples: Any, preds: Any, label_key: str) -> Any:
        labels = np.array([example[label_key] for example in examples])
        return {"square error": np.mean(np.square(np.array(preds) - labels))}

    return fine_tune(
        redco,
        devices,
        Model(1 if is_regression else 2, pools=True),
        partial(collate_fn, tokenizer=tokenizer, label_key="label"),
        partial(loss_fn, is_regression=is_regression),
        lambda model: partial(pred_fn, model=model, is_regression=is_regression),
        None,
        partial(metric_fn, label_key="label"),
    )


def fine_tune(
    redco: Any,
    devices: int,
    model: Any,
    collate_fn: Any,
    loss_fn: Any,
    make_pred_fn: Any,
    output_fn: Any,
    metric_fn: Any,
    *,
    shards: int = 1,
    workdir: str | None = None,
    n_epochs: int = 3,
    **fit_arguments: Any,
) -> list[float]:
    """Train a model from its newest checkpoint, or its first one, as redco's programs for transformers do."""
    deployer = redco.Deployer(
        workdir=workdir,
        jax_seed=42,
        n_model_shards=shards,
        verbose=False,
        host0_address=None,
        host0_port=None,
        process_id=None,
        n_local_devices=None,
    )
    rows = ROWS * shards // devices // 2
    accumulate_grad_batches = deployer.get_accumulate_grad_batches(global_batch_size=ROWS, per_device_batch_size=rows)
    lr_schedule_fn = deployer.get_lr_schedule_fn(
        train_size=len(TRAIN),
        per_device_batch_size=rows,
        n_epochs=3,
        learning_rate=0.05,
        schedule_type="linear",
        warmup_ratio=0.1,
    )
    optimizer = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate=lr_schedule_fn, weight_decay=0.01)),
        every_k_schedule=accumulate_grad_batches,
    )
    ckpt: Any = None
    if workdir is not None:
        ckpt, info = deployer.load_last_ckpt(optimizer=optimizer, float_dtype=jnp.float32)
    if ckpt is None:
        folder = f"{tempfile.mkdtemp()}/init"
        deployer.save_ckpt(ckpt_dir=folder, params=jax.tree.map(jnp.asarray, model.params))
        ckpt, info = deployer.load_ckpt(ckpt_dir=folder, update_rng=False, float_dtype=jnp.float32)
    rules = deployer.get_sharding_rules(params_shape_or_params=ckpt["params"])
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=collate_fn,
        apply_fn=model,
        loss_fn=loss_fn,
        params=ckpt.pop("params"),
        opt_state=ckpt.pop("opt_state"),
        last_ckpt_info=info,
        optimizer=optimizer,
        compute_dtype=jnp.float32,
        lr_schedule_fn=lr_schedule_fn,
        accumulate_grad_batches=accumulate_grad_batches,
        params_sharding_rules=rules,
    )
    predictor = None
    if make_pred_fn is not None:
        predictor = redco.Predictor(
            deployer=deployer,
            collate_fn=collate_fn,
            pred_fn=make_pred_fn(model),
            output_fn=output_fn,
            params_sharding_rules=rules,
        )
    trainer.fit(
        train_examples=TRAIN,
        per_device_batch_size=rows,
        n_epochs=n_epochs,
        eval_examples=TEST,
        eval_predictor=predictor,
        eval_metric_fn=metric_fn,
        **{"save_last_ckpt": False, **fit_arguments},
    )
    return [trainer.eval_loss(TRAIN, rows), trainer.eval_loss(TEST, rows)]


def seq2seq_batch(examples: Any, tokenizer: Any, source: Callable[[Any], Any]) -> Any:
    model_inputs = source(examples)
    decoder_inputs = tokenizer([example["tgt"] for example in examples])
    labels = decoder_inputs["input_ids"]
    decoder_inputs["input_ids"] = np.zeros_like(labels)
    decoder_inputs["input_ids"][:, 1:] = labels[:, :-1]
    model_inputs["labels"] = labels
    for key in decoder_inputs:
        model_inputs[f"decoder_{key}"] = np.array(decoder_inputs[key])
    return model_inputs


def token_batch(examples: Any) -> Any:
    return tokenizer([example["src"] for example in examples])


def pixel_batch(examples: Any) -> Any:
    return {"pixel_values": np.stack([example["pixels"] for example in examples], axis=0)}


def seq2seq_loss(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    labels, weights = batch.pop("labels"), batch["decoder_attention_mask"]
    logits = state.apply_fn(**batch, params=params, dropout_rng=rng, train=is_training)[0]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels)
    return jnp.sum(loss * weights) / jnp.sum(weights)


def overlap(examples: Any, preds: Any) -> Any:
    pairs = [(set(each["tgt"]), set(map(int, text.split()))) for each, text in zip(examples, preds, strict=True)]
    return {"rougeL": np.mean([len(one & other) / len(one) for one, other in pairs])}


def decode(batch_preds: Any, tokenizer: Any) -> Any:
    return [" ".join(map(str, row)) for row in batch_preds.tolist()]


def text_to_text(redco: Any, devices: int) -> list[float]:
    """A model with an encoder and a decoder: a mean over tokens, and texts as predictions."""

    def pred_fn(rng: Any, params: Any, batch: Any, model: Any) -> Any:
        return model.generate(batch["input_ids"], batch["attention_mask"], params=params, prng_key=rng).sequences

    return fine_tune(
        redco,
        devices,
        Model(encoder="input_ids"),
        partial(seq2seq_batch, tokenizer=tokenizer, source=token_batch),
        seq2seq_loss,
        lambda model: partial(pred_fn, model=model),
        partial(decode, tokenizer=tokenizer),
        overlap,
    )


def image_to_text(redco: Any, devices: int) -> list[float]:
    """Texts for images."""

    def pred_fn(rng: Any, batch: Any, params: Any, model: Any) -> Any:
        return model.generate(batch["pixel_values"], params=params, prng_key=rng).sequences

    return fine_tune(
        redco,
        devices,
        Model(encoder="pixel_values"),
        partial(seq2seq_batch, tokenizer=tokenizer, source=pixel_batch),
        seq2seq_loss,
        lambda model: partial(pred_fn, model=model),
        partial(decode, tokenizer=tokenizer),
        overlap,
    )


def language_modeling(redco: Any, devices: int, **arguments: Any) -> list[float]:
    """A causal language model, with the model sharded over all devices."""

    def collate_fn(examples: Any) -> Any:
        token_ids = np.array([example["src"] + example["tgt"] for example in examples])
        return {"input_ids": token_ids[:, :-1], "labels": token_ids[:, 1:]}

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        labels = batch.pop("labels")
        logits = state.apply_fn(**batch, params=params, dropout_rng=rng, train=is_training)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels).mean()

    arguments = {"save_opt_states": False, **arguments}
    return fine_tune(redco, devices, Model(), collate_fn, loss_fn, None, None, None, shards=devices, **arguments)


def resumed(redco: Any, devices: int) -> list[float]:
    """A language model in two calls of the program: the second one resumes from the last checkpoint of the first."""
    arguments = {"workdir": tempfile.mkdtemp(), "save_last_ckpt": True, "save_opt_states": True}
    language_modeling(redco, devices, n_epochs=1, **arguments)
    return language_modeling(redco, devices, **arguments)


def lora(redco: Any, devices: int) -> list[float]:
    """Low-rank updates of a frozen model: rules and optimizers for parts of the parameters."""

    def aggregate(params: Any) -> Any:
        kernel = params["model"]["head"]["kernel"] + params["lora"]["a"] @ params["lora"]["b"]
        return {**params["model"], "head": {"kernel": kernel}}

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
        return seq2seq_loss(rng, state, aggregate(params), batch, is_training)

    def pred_fn(rng: Any, params: Any, batch: Any, model: Any) -> Any:
        mask = batch["attention_mask"]
        return model.generate(batch["input_ids"], mask, params=aggregate(params), prng_key=rng).sequences

    deployer = redco.Deployer(jax_seed=42, verbose=False)
    model = Model(encoder="input_ids")
    first = jax.nn.initializers.he_uniform()(deployer.gen_rng(), (WIDTH, 2), jnp.float32)
    params = {"model": model.params, "lora": {"a": first, "b": jnp.zeros((2, VOCABULARY))}}
    rules = {"model": deployer.get_sharding_rules(params["model"]), "lora": None}
    optimizer: Any = optax.MultiSteps(optax.adamw(0.05), every_k_schedule=2)
    optimizer = optax.multi_transform(
        transforms={"model": optax.set_to_zero(), "lora": optimizer},
        param_labels=freeze(path_aware_map(lambda path, _: path[0], params)),
    )
    collate_fn = partial(seq2seq_batch, tokenizer=tokenizer, source=token_batch)
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=collate_fn,
        apply_fn=model,
        loss_fn=loss_fn,
        params=params,
        optimizer=optimizer,
        accumulate_grad_batches=2,
        params_sharding_rules=rules,
    )
    predictor = redco.Predictor(
        deployer=deployer,
        collate_fn=collate_fn,
        pred_fn=partial(pred_fn, model=model),
        output_fn=partial(decode, tokenizer=tokenizer),
        params_sharding_rules=rules,
    )
    rows = ROWS // devices // 2
    trainer.fit(
        train_examples=TRAIN,
        per_device_batch_size=rows,
        n_epochs=3,
        eval_examples=TEST,
        eval_predictor=predictor,
        eval_metric_fn=overlap,
    )
    deployer.save_ckpt(
        f"{tempfile.mkdtemp()}/lora", params=trainer.get_params_to_save()["lora"], float_dtype=jnp.float32
    )
    changed = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a) - b).max(), unfreeze(trainer.params)["model"], model.params
    )
    return [trainer.eval_loss(TRAIN, rows), trainer.eval_loss(TEST, rows), max(jax.tree.leaves(changed))]


def text_to_image(redco: Any, devices: int) -> list[float]:
    """A denoising model between frozen ones: images for texts, and parameters of the trainer's state for a predictor."""

    def collate_fn(examples: Any) -> Any:
        batch = token_batch(examples)
        if "pixels" in examples[0]:
            pixels = [example["pixels"].reshape(-1) for example in examples]
            batch["pixel_values"] = np.stack(pixels).astype(np.float16)
        return batch

    def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool, noise_scale: float) -> Any:
        sample_rng, timestep_rng = jax.random.split(rng, num=2)
        latents = batch["pixel_values"] @ params["vae"]["kernel"]
        timesteps = jax.random.randint(key=timestep_rng, shape=(latents.shape[0],), minval=0, maxval=1)
        noise = jnp.cos(latents) + noise_scale * jax.random.normal(sample_rng, latents.shape)
        text = params["text_encoder"]["embed"]["embedding"][batch["input_ids"]].mean(axis=1)
        pred = state.apply_fn({"params": params["unet"]}, latents + noise * (1 - timesteps[:, None]), text)
        return jnp.mean((noise - pred) ** 2)

    def pred_fn(rng: Any, batch: Any, params: Any, model: Any) -> Any:
        text = params["text_encoder"]["embed"]["embedding"][batch["input_ids"]].mean(axis=1)
        start = jax.random.normal(rng, text.shape)
        return model.apply({"params": params["unet"]}, start, text)

    deployer = redco.Deployer(jax_seed=42, verbose=False)
    unet = MLP(WIDTH)
    params: Any = {
        "text_encoder": {"embed": {"embedding": jnp.asarray(Model().params["embed"]["embedding"])}},
        "unet": unet.init(deployer.gen_rng(), jnp.zeros((1, WIDTH)), jnp.zeros((1, WIDTH)))["params"],
        "vae": {"kernel": jnp.asarray(np.random.default_rng(4).normal(size=(12, WIDTH)).astype(np.float32))},
    }
    folder = f"{tempfile.mkdtemp()}/init"
    deployer.save_ckpt(ckpt_dir=folder, params=params)
    labels = path_aware_map(
        lambda path, _: "trainable" if path[0] == "unet" else "frozen", unfreeze(deployer.load_params_shape(folder))
    )
    optimizer: Any = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05)), every_k_schedule=2
    )
    optimizer = optax.multi_transform({"trainable": optimizer, "frozen": optax.set_to_zero()}, freeze(labels))
    ckpt, info = deployer.load_ckpt(ckpt_dir=folder, update_rng=False, float_dtype=jnp.float32)
    rules = {name: deployer.get_sharding_rules(ckpt["params"][name]) for name in params}
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=collate_fn,
        apply_fn=unet.apply,
        loss_fn=partial(loss_fn, noise_scale=0),
        params=ckpt.pop("params"),
        opt_state=ckpt.pop("opt_state"),
        last_ckpt_info=info,
        optimizer=optimizer,
        lr_schedule_fn=lambda step: 0.05,
        accumulate_grad_batches=2,
        params_sharding_rules=rules,
    )
    predictor = redco.Predictor(
        deployer=deployer,
        collate_fn=collate_fn,
        pred_fn=partial(pred_fn, model=unet),
        output_fn=lambda batch_preds: [row.tolist() for row in np.asarray(batch_preds)],
        params_sharding_rules=rules,
    )
    rows = ROWS // devices // 2
    trainer.fit(train_examples=TRAIN, per_device_batch_size=rows, n_epochs=3, save_last_ckpt=False)
    images = predictor.predict(
        examples=[{"src": example["src"]} for example in TEST[:5]],
        params=trainer.state.params,
        params_replicated=(trainer.mesh is None),
        params_sharded=(trainer.mesh is not None),
        per_device_batch_size=rows,
    )
    return [trainer.eval_loss(TRAIN, rows), trainer.eval_loss(TEST, rows), np.shape(images)[0]]
