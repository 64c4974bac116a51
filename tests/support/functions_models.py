"""Small flax models for the tests of `raysgd.functions`: transformers of several families, a CNN and MLPs.

Each is a function from sizes to a linen module and the inputs of its `init`. `shapes` gives the parameters' shapes only.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY, WIDTH, HEADS, LENGTH = 96, 32, 4, 8
IDS = np.zeros((4, LENGTH), np.int32)


def shapes(module: nn.Module, *inputs: Any) -> Any:
    """Return the tree of the shapes of a module's parameters."""
    return jax.eval_shape(lambda: module.init(jax.random.PRNGKey(0), *inputs))["params"]


class Transposed(nn.Module):
    """A layer whose kernel is stored as (outputs, inputs), as GPT-2 of transformers for flax stored it."""

    features: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return x @ kernel.T + bias


class Scale(nn.Module):
    """RMS norm."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        return x * weight * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attend(q: Any, k: Any, v: Any, *, heads: int, is_causal: bool, bias: Any = 0.0) -> Any:
    """Attention over (batch, length, features). Keys and values may have fewer heads than queries."""
    q = q.reshape(*q.shape[:2], heads, -1)
    k, v = (x.reshape(*x.shape[:2], -1, q.shape[-1]) for x in (k, v))
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5 + bias
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    out = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
    return out.reshape(*out.shape[:2], -1)


# --------------------------------------------------------------------------------------------------------------- GPT-2


class FusedAttention(nn.Module):
    heads: int = HEADS

    @nn.compact
    def __call__(self, x: Any) -> Any:
        q, k, v = jnp.split(Transposed(3 * x.shape[-1], name="c_attn")(x), 3, axis=-1)
        return Transposed(x.shape[-1], name="c_proj")(attend(q, k, v, heads=self.heads, is_causal=True))


class TransposedMlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Transposed(x.shape[-1], name="c_proj")(nn.gelu(Transposed(4 * x.shape[-1], name="c_fc")(x)))


class Gpt2Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + FusedAttention(name="attn")(nn.LayerNorm(name="ln_1")(x))
        return x + TransposedMlp(name="mlp")(nn.LayerNorm(name="ln_2")(x))


class Blocks(nn.Module):
    block: Any
    layers: int

    @nn.compact
    def __call__(self, x: Any, *others: Any) -> Any:
        for number in range(self.layers):
            x = self.block(name=str(number))(x, *others)
        return x


class Gpt2(nn.Module):
    vocabulary: int = VOCABULARY
    width: int = WIDTH
    layers: int = 2

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        wte = nn.Embed(self.vocabulary, self.width, name="wte")
        x = wte(ids) + nn.Embed(LENGTH, self.width, name="wpe")(jnp.arange(ids.shape[1]))
        return wte.attend(nn.LayerNorm(name="ln_f")(Blocks(Gpt2Block, self.layers, name="h")(x)))


# --------------------------------------------------------------------------------------------------------------- LLaMA


class LlamaAttention(nn.Module):
    kv_heads: int = HEADS

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width, kv_width = x.shape[-1], x.shape[-1] // HEADS * self.kv_heads
        sizes = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        q, k, v = (nn.Dense(size, use_bias=False, name=name)(x) for name, size in sizes.items())
        return nn.Dense(width, use_bias=False, name="o_proj")(attend(q, k, v, heads=HEADS, is_causal=True))


class LlamaMlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        gate, up = (nn.Dense(3 * x.shape[-1], use_bias=False, name=name)(x) for name in ("gate_proj", "up_proj"))
        return nn.Dense(x.shape[-1], use_bias=False, name="down_proj")(nn.silu(gate) * up)


class LlamaBlock(nn.Module):
    kv_heads: int = HEADS

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + LlamaAttention(self.kv_heads, name="self_attn")(Scale(name="input_layernorm")(x))
        return x + LlamaMlp(name="mlp")(Scale(name="post_attention_layernorm")(x))


class Llama(nn.Module):
    kv_heads: int = HEADS
    layers: int = 2
    vocabulary: int = VOCABULARY

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(self.vocabulary, WIDTH, name="embed_tokens")(ids)
        for number in range(self.layers):
            x = LlamaBlock(self.kv_heads, name=f"layers_{number}")(x)
        return nn.Dense(self.vocabulary, use_bias=False, name="lm_head")(Scale(name="norm")(x))


class ScannedLlama(nn.Module):
    """LLaMA whose layers are one module with stacked parameters."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        def body(block: Any, x: Any, _: Any) -> Any:
            return block(x), None

        x = nn.Embed(VOCABULARY, WIDTH, name="embed_tokens")(ids)
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(LlamaBlock(name="layers"), x, None)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(Scale(name="norm")(x))


# ------------------------------------------------------------------------------------------------------------------ T5

T5_HEAD_SIZE = 12  # HEADS * T5_HEAD_SIZE != WIDTH


class T5Attention(nn.Module):
    is_causal: bool = False
    has_bias: bool = False
    head_size: int = T5_HEAD_SIZE

    @nn.compact
    def __call__(self, x: Any, context: Any) -> Any:
        inner = HEADS * self.head_size
        q = nn.Dense(inner, use_bias=False, name="q")(x)
        k, v = (nn.Dense(inner, use_bias=False, name=name)(context) for name in "kv")
        bias = 0.0
        if self.has_bias:
            table = nn.Embed(8, HEADS, name="relative_attention_bias")
            distance = jnp.abs(jnp.arange(x.shape[1])[:, None] - jnp.arange(context.shape[1])[None])
            bias = table(distance).transpose(2, 0, 1)
        out = attend(q, k, v, heads=HEADS, is_causal=self.is_causal, bias=bias)
        return nn.Dense(x.shape[-1], use_bias=False, name="o")(out)


class T5Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(WIDTH, use_bias=False, name="wo")(nn.relu(nn.Dense(2 * WIDTH, use_bias=False, name="wi")(x)))


class T5Block(nn.Module):
    is_decoder: bool
    has_bias: bool
    head_size: int = T5_HEAD_SIZE

    @nn.compact
    def __call__(self, x: Any, encoded: Any) -> Any:
        norm = Scale(name="norm_0")(x)
        x = x + T5Attention(self.is_decoder, self.has_bias, self.head_size, name="SelfAttention")(norm, norm)
        if self.is_decoder:
            cross = T5Attention(head_size=self.head_size, name="EncDecAttention")
            x = x + cross(Scale(name="norm_1")(x), encoded)
        return x + T5Mlp(name="DenseReluDense")(Scale(name="norm_2")(x))


class T5(nn.Module):
    layers: int = 2
    head_size: int = T5_HEAD_SIZE
    encoder_layers: int = 1

    @nn.compact
    def __call__(self, ids: Any, decoder_ids: Any) -> Any:
        shared = nn.Embed(VOCABULARY, WIDTH, name="shared")
        x, y = shared(ids), shared(decoder_ids)
        for number in range(self.encoder_layers):
            x = T5Block(False, number == 0, self.head_size, name=f"encoder_{number}")(x, None)
        x = Scale(name="encoder_norm")(x)
        for number in range(self.layers):
            y = T5Block(True, number == 0, self.head_size, name=f"decoder_{number}")(y, x)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(Scale(name="decoder_norm")(y))


# ---------------------------------------------------------------------------------------------------------------- BERT


class BertSelf(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return attend(
            *(nn.Dense(WIDTH, name=name)(x) for name in ("query", "key", "value")), heads=HEADS, is_causal=False
        )


class BertOutput(nn.Module):
    @nn.compact
    def __call__(self, x: Any, stream: Any) -> Any:
        return nn.LayerNorm(name="LayerNorm")(stream + nn.Dense(WIDTH, name="dense")(x))


class BertAttention(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return BertOutput(name="output")(BertSelf(name="self")(x), x)


class BertIntermediate(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.gelu(nn.Dense(4 * WIDTH, name="dense")(x))


class BertLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = BertAttention(name="attention")(x)
        return BertOutput(name="output")(BertIntermediate(name="intermediate")(x), x)


class Bert(nn.Module):
    layers: int = 2
    classes: int = 3

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH, name="word_embeddings")(ids)
        x = x + nn.Embed(LENGTH, WIDTH, name="position_embeddings")(jnp.arange(ids.shape[1]))
        x = nn.LayerNorm(name="LayerNorm")(x + nn.Embed(2, WIDTH, name="token_type_embeddings")(jnp.zeros_like(ids)))
        x = Blocks(BertLayer, self.layers, name="layer")(x)
        return nn.Dense(self.classes, name="classifier")(nn.tanh(nn.Dense(WIDTH, name="pooler")(x[:, 0])))


# --------------------------------------------------------------------------------------------- attention of flax itself


class LinenAttentionBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attention")(nn.LayerNorm(name="norm_0")(x))
        inner = nn.gelu(nn.Dense(3 * WIDTH, name="up")(nn.LayerNorm(name="norm_1")(x)))
        return x + nn.Dense(WIDTH, name="down")(inner)


class VisionTransformer(nn.Module):
    """A classifier of images that has flax's own attention and a convolution that makes patches."""

    layers: int = 1

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), name="patches")(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        x = Blocks(LinenAttentionBlock, self.layers, name="layers")(x)
        return nn.Dense(10, name="head")(nn.LayerNorm(name="norm")(x).mean(axis=1))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxTransformer(nnx.Module):
    """A language model in nnx."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 2) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


# -------------------------------------------------------------------------------------------------------- no residual


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.avg_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class Mlp(nn.Module):
    sizes: tuple[int, ...] = (48, 24, 4)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for number, size in enumerate(self.sizes):
            x = nn.Dense(size)(nn.relu(x) if number else x)
        return x
