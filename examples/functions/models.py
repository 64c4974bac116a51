"""Small flax models for the examples of this folder: transformers for text and captions, a CNN, a denoiser and MLPs.

Any model does whose parameters are a tree of arrays; nothing here knows of devices or workers.
"""

# test: tests/docs/test_functions_examples.py

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from texts import BEGIN, PAD


def init_params(model: nn.Module, *inputs, seed: int = 0) -> dict:
    """Make parameters in the script. Inputs need the right shapes only."""
    params = jax.jit(model.init)(jax.random.PRNGKey(seed), *inputs)["params"]
    return jax.tree.map(np.asarray, params)


class Block(nn.Module):
    """A layer of a transformer, with attention to an encoder's states if they are given."""

    heads: int

    @nn.compact
    def __call__(self, x, mask, encoded=None, encoded_mask=None):
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        if encoded is not None:
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), encoded, mask=encoded_mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class Encoder(nn.Module):
    vocabulary: int
    width: int = 64
    heads: int = 4
    layers: int = 2

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(self.vocabulary, self.width)(ids)
        x = x + self.param("positions", nn.initializers.normal(0.02), (ids.shape[1], self.width))
        mask = nn.make_attention_mask(ids != PAD, ids != PAD)
        for _ in range(self.layers):
            x = Block(self.heads)(x, mask)
        return nn.LayerNorm()(x)


class Decoder(nn.Module):
    """Logits of the next word at each position; a language model if there is nothing to attend to but its own words."""

    vocabulary: int
    width: int = 64
    heads: int = 4
    layers: int = 2

    @nn.compact
    def __call__(self, ids, encoded=None, encoded_mask=None):
        x = nn.Embed(self.vocabulary, self.width)(ids)
        x = x + self.param("positions", nn.initializers.normal(0.02), (ids.shape[1], self.width))
        mask = nn.make_causal_mask(ids)
        for _ in range(self.layers):
            x = Block(self.heads)(x, mask, encoded, encoded_mask)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


class Classifier(nn.Module):
    vocabulary: int
    classes: int
    width: int = 32
    layers: int = 2

    @nn.compact
    def __call__(self, ids):
        x = Encoder(self.vocabulary, self.width, layers=self.layers)(ids)
        return nn.Dense(self.classes)(x[:, 0])


class Seq2Seq(nn.Module):
    vocabulary: int
    width: int = 64
    layers: int = 1

    def setup(self):
        self.encoder = Encoder(self.vocabulary, self.width, layers=self.layers)
        self.decoder = Decoder(self.vocabulary, self.width, layers=self.layers)

    def encode(self, source_ids):
        return self.encoder(source_ids)

    def decode(self, ids, encoded, source_ids):
        return self.decoder(ids, encoded, nn.make_attention_mask(ids >= 0, source_ids != PAD))

    def __call__(self, source_ids, ids):
        return self.decode(ids, self.encode(source_ids), source_ids)


class Captioner(nn.Module):
    """A convolution makes patches of a picture, a transformer describes them."""

    vocabulary: int
    width: int = 64
    patch: int = 4

    def setup(self):
        self.patches = nn.Conv(self.width, (self.patch, self.patch), strides=(self.patch, self.patch))
        self.block = Block(4)
        self.decoder = Decoder(self.vocabulary, self.width, layers=1)
        self.positions = self.param("positions", nn.initializers.normal(0.5), (9, self.width))

    def encode(self, images):
        x = self.patches(images)
        return self.block(x.reshape(x.shape[0], -1, self.width) + self.positions, None)

    def decode(self, ids, encoded):
        return self.decoder(ids, encoded)

    def __call__(self, images, ids):
        return self.decode(ids, self.encode(images))


def only_begin(ids):
    """Return prompts of this shape that have nothing but `BEGIN`."""
    return jnp.full_like(ids, PAD).at[:, 0].set(BEGIN)


def generate(next_logits, prompts):
    """Complete rows of words, the most probable word first.

    Args:
        next_logits: Returns the logits of the next word at each position, (rows, length, vocabulary), for words (rows, length).
        prompts: The words that are given, and `PAD` where one is to be generated.
    """

    def write(position, ids):
        best = next_logits(ids)[:, position - 1].argmax(-1).astype(ids.dtype)
        return ids.at[:, position].set(jnp.where(prompts[:, position] == PAD, best, prompts[:, position]))

    return jax.lax.fori_loop(1, prompts.shape[1], write, prompts)


class Cnn(nn.Module):
    classes: int = 10

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(self.classes)(nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1))))


class Denoiser(nn.Module):
    """The noise in pictures, (rows, pixels), at a time of diffusion in [0, 1], given a text."""

    vocabulary: int
    width: int = 128
    layers: int = 2

    @nn.compact
    def __call__(self, noisy, times, ids):
        is_word = (ids != PAD)[..., None]
        text = (nn.Embed(self.vocabulary, self.width)(ids) * is_word).sum(axis=1) / is_word.sum(axis=1)
        angles = times[:, None] * jnp.pi * 2.0 ** jnp.arange(-1, 7)
        clock = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        about = nn.silu(nn.Dense(self.width)(clock) + nn.Dense(self.width)(text))
        x = nn.Dense(self.width)(noisy)
        for _ in range(self.layers):
            y = nn.LayerNorm()(x) * (1 + nn.Dense(self.width)(about)) + nn.Dense(self.width)(about)
            x = x + nn.Dense(self.width)(nn.silu(nn.Dense(self.width)(y)))
        return nn.Dense(noisy.shape[-1])(nn.LayerNorm()(x))


class Mlp(nn.Module):
    """Dense layers of these sizes with an activation between them."""

    sizes: tuple[int, ...]
    activation: Callable = nn.tanh
    last_scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        for size in self.sizes[:-1]:
            x = self.activation(nn.Dense(size)(x))
        init = nn.initializers.variance_scaling(self.last_scale, "fan_in", "truncated_normal")
        return nn.Dense(self.sizes[-1], kernel_init=init)(x)
