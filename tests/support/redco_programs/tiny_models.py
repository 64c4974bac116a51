"""Tiny models of the kinds that redco's examples have, and examples for them."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

ROWS, VOCABULARY, WIDTH, LENGTH = 8, 13, 8, 6
Json = dict[str, Any]


class CNN(nn.Module):
    """A small convolutional network."""

    features: int = 10

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(features=4, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(features=16)(x.reshape((x.shape[0], -1))))
        return nn.Dense(features=self.features)(x)


class MLP(nn.Module):
    """A network of two layers."""

    features: int

    @nn.compact
    def __call__(self, *arrays: Any) -> Any:
        x = nn.relu(nn.Dense(features=16)(jnp.concatenate(arrays, axis=-1)))
        return nn.Dense(features=self.features)(x)


class Model:
    """A model as transformers had them for flax: called with arrays by name and parameters, and returns an output of its own."""

    def __init__(self, features: int = VOCABULARY, *, pools: bool = False, encoder: str | None = None) -> None:
        self._features, self._pools, self._encoder = features, pools, encoder
        shapes = {"embed": {"embedding": (VOCABULARY, WIDTH)}, "up": {"kernel": (WIDTH, WIDTH)}}
        shapes |= {"head": {"kernel": (WIDTH, features)}}
        if encoder == "pixel_values":
            shapes["encoder"] = {"kernel": (12, WIDTH)}
        generator = np.random.default_rng(0)
        self.params: Any = jax.tree.map(
            lambda shape: generator.normal(0, 0.4, shape).astype(np.float32), shapes, is_leaf=lambda x: type(x) is tuple
        )

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        pixel_values: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        *,
        params: Any,
        dropout_rng: Any = None,
        train: bool = False,
    ) -> Any:
        table, context = params["embed"]["embedding"], 0
        if self._encoder == "pixel_values":
            context = (pixel_values.reshape(pixel_values.shape[0], -1) @ params["encoder"]["kernel"])[:, None]
        elif self._encoder:
            weights = attention_mask[..., None]
            context = jnp.sum(table[input_ids] * weights, 1, keepdims=True) / jnp.sum(weights, 1, keepdims=True)
        hidden = table[input_ids if decoder_input_ids is None else decoder_input_ids] + context
        if train:
            hidden = hidden + 0 * jax.random.normal(dropout_rng, hidden.shape)
        hidden = hidden + jnp.tanh(hidden @ params["up"]["kernel"])
        hidden = hidden.mean(axis=1) if self._pools else hidden
        logits = hidden @ params["head"]["kernel"]
        return UserTuple(logits)

    def generate(self, first: Any, attention_mask: Any = None, *, params: Any, prng_key: Any = None) -> Any:
        """Return the likeliest tokens, one after the other, as ``sequences``."""
        given = {self._encoder or "input_ids": first, "attention_mask": attention_mask}

        def step(token: Any, _: Any) -> Any:
            inputs = given if self._encoder else {}
            name = "decoder_input_ids" if self._encoder else "input_ids"
            new = self(**{**inputs, name: token[:, None]}, params=params).logits[:, -1].argmax(-1)
            return new, new

        start = jnp.zeros(first.shape[0], int) if self._encoder else first[:, -1]
        return SimpleNamespace(sequences=jax.lax.scan(step, start, length=4)[1].T)


class UserTuple(tuple):
    """An output that is read as ``output[0]`` or ``output.logits``."""

    def __new__(cls, logits: Any) -> UserTuple:
        return super().__new__(cls, (logits,))

    @property
    def logits(self) -> Any:
        return self[0]


def tokenizer(texts: list[list[int]], max_length: int = LENGTH) -> Any:
    """Pad to a length, and return an encoding that is a mapping of its own class, as tokenizers do."""
    ids = np.array([(row + [0] * max_length)[:max_length] for row in texts])
    mask = np.array([([1] * len(row) + [0] * max_length)[:max_length] for row in texts])
    return UserDict(input_ids=ids, attention_mask=mask)


def texts(seed: int, number: int = ROWS, length: int = 4) -> list[Json]:
    """Return examples: a source, a target that follows from it, a label and an image."""
    generator = np.random.default_rng(seed)
    return [
        {
            "src": (src := generator.integers(1, VOCABULARY, length)).tolist(),
            "tgt": [int(token * 2 % VOCABULARY) for token in src],
            "label": int(src[0] % 2),
            "image": generator.random((8, 8)).astype(np.float32),
            "pixels": generator.random((2, 2, 3)).astype(np.float32),
        }
        for _ in range(number)
    ]


TRAIN, TEST = texts(0), texts(1)
