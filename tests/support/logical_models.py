"""Training functions for runs of logical workers: a convolutional network and a small GPT, with all that draws or keeps state."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any

import raysgd
from support.runs import once


def make_model(kind: str) -> Any:
    """Return a network with dropout; the convolutional one with batch normalization too."""
    import torch
    from torch import nn

    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(8 * 4, 10),
        )

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(16, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.tokens.weight
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16))

        def forward(self, tokens: Any) -> Any:
            length = tokens.shape[1]
            embedded = self.tokens(tokens) + self.places(torch.arange(length))
            return self.head(self.layers(embedded, mask=self.mask[:length, :length])).transpose(1, 2)

    return Gpt()


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train for some steps; return the step that it began with, and a digest of weights, buffers and optimizer.

    The config has ``kind`` and ``num_steps``; perhaps ``amp`` (bfloat16, with scaled gradients), ``accumulate`` (steps of the
    data for a step of the optimizer), ``lr``, ``checksums`` (report them), and ``deaths`` with a ``folder``: by step, the
    rank that dies then.
    """
    import torch
    from torch import nn

    model = raysgd.torch.prepare_model(make_model(config["kind"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 3e-3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=config.get("amp", False))
    count = start = 0
    if (state := raysgd.load_checkpoint()) is not None:
        for part, name in ((model, "model"), (optimizer, "optimizer"), (scaler, "scaler")):
            part.load_state_dict(state[name])
        count = start = state["count"]
    size, accumulate = config.get("batch_size", 3), config.get("accumulate", 1)
    split = raysgd.get_dataset().get_split()
    batches = split.to_torch(size, label_column="y", feature_columns=["x"], shuffle="full")
    metrics: dict[str, Any] = {}
    while count < config["num_steps"]:
        for step in raysgd.torch.logical_steps(batches, model):
            if count % accumulate == 0:
                optimizer.zero_grad()
            _compute(step, model, scaler)
            count += 1
            if count % accumulate == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            metrics = step.means()
            raysgd.report(metrics | (raysgd.torch.checksums(model) if config.get("checksums") else {}), count=count)
            if "deaths" in config:
                _die_if_planned(config, count)  # not after the save, at which a group that grows leaves the attempt
                scale = scaler.state_dict()
                raysgd.save_checkpoint({"model": model, "optimizer": optimizer, "scaler": scale, "count": count})
                time.sleep(config.get("pause_s", 0))
            if count == config["num_steps"]:
                break
    return {"start": start, "digest": digest(model, optimizer), "loss": metrics["loss"]}


def _compute(step: Any, model: Any, scaler: Any) -> None:
    """Compute the gradients of a step, from inputs with noise of all three generators."""
    import random

    import numpy as np
    import torch

    for x, y in step:
        if x.is_floating_point():
            x = x + 0.1 * torch.randn_like(x) + random.random() + float(np.random.rand())
        with torch.autocast("cpu", torch.bfloat16, enabled=scaler.is_enabled()):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        step.record(loss=loss, square=loss.detach() ** 2)


def _die_if_planned(config: dict[str, Any], count: int) -> None:
    if config["deaths"].get(str(count)) == raysgd.world_rank() and once(config["folder"], f"death{count}"):
        os.kill(os.getpid(), signal.SIGKILL)


def digest(model: Any, optimizer: Any) -> str:
    """Return a digest of all bits of a training's state."""
    import torch

    found = hashlib.sha256()
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def make_data(kind: str, num_rows: int) -> dict[str, Any]:
    """Return rows for a network; their number need not divide by that of a step."""
    import numpy as np

    rng = np.random.default_rng(0)
    if kind == "conv":
        return {"x": rng.standard_normal((num_rows, 1, 8, 8)).astype(np.float32), "y": rng.integers(0, 10, num_rows)}
    tokens = rng.integers(0, 50, (num_rows, 13))
    return {"x": tokens[:, :-1].copy(), "y": tokens[:, 1:].copy()}


def train_jax(config: dict[str, Any]) -> dict[str, Any]:
    """Train a network with dropout, and a running mean in place of batch normalization; config and result as for `train`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    draw = np.random.default_rng(0)
    params = {"in": draw.normal(0, 1 / 8, (64, 32)), "out": draw.normal(0, 1 / 6, (32, 10))}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    state = {"params": params, "optimizer": optimizer.init(params), "mean": jnp.zeros(64), "count": jnp.zeros((), int)}
    if (saved := raysgd.load_checkpoint()) is not None:
        state = raysgd.jax.restore(saved, like=state)
    start = count = int(state["count"])

    @jax.jit
    def compute(params: Any, mean: Any, x: Any, y: Any, key: Any) -> Any:
        def loss_of(params: Any) -> Any:
            hidden = jax.nn.relu((x - mean) @ params["in"])
            hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0)
            return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], y).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return loss, (gradients, 0.9 * mean + 0.1 * x.mean(0))

    @jax.jit
    def update(state: Any, added: Any) -> Any:
        gradients, mean = added
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state, "mean": mean, "count": state["count"] + 1}

    batches = raysgd.get_dataset().get_split().to_jax(3, label_column="y", feature_columns=["x"], shuffle="full")
    metrics: dict[str, Any] = {}
    while count < config["num_steps"]:
        for step in raysgd.jax.logical_steps(batches):
            for x, y in step:
                noisy = np.asarray(x).reshape(len(x), -1) + np.float32(np.random.rand() / 10)
                key = jax.random.fold_in(jax.random.key(count), step.logical_rank)
                loss, added = compute(state["params"], state["mean"], noisy, y, key)
                step.add(added)
                step.record(loss=loss)
            state = update(state, step.gradients)
            count += 1
            metrics = step.means()
            raysgd.report(metrics, count=count)
            if "deaths" in config:
                _die_if_planned(config, count)
                raysgd.save_checkpoint(state)
                time.sleep(config.get("pause_s", 0))
            if count == config["num_steps"]:
                break
    found = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
    return {"start": start, "digest": hashlib.sha256(found).hexdigest(), "loss": metrics["loss"]}
