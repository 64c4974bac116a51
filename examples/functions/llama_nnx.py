"""Train a LLaMA of Hugging Face in JAX: its weights are read from a safetensors file in shards, and written to one again.

    python examples/functions/llama_nnx.py [--weights FOLDER] [--output FOLDER] [--workers 2] [--n-model-shards 2] [--epochs 4]

The weights are those that `save_pretrained` of transformers wrote; without them a tiny LLaMA with random weights is made. It
learns the sentences of causal_lm.py, to a perplexity of 2.2 or less. Before and after, its logits are those of transformers.
"""

# test: tests/docs/test_functions_examples.py

import argparse
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import torch
from causal_lm import LENGTH, load_dataset, perplexity_of_bigrams
from flax import nnx
from safetensors.numpy import save_file
from texts import PAD, Vocabulary
from transformers import LlamaConfig, LlamaForCausalLM

from raysgd.functions import Deployer, Predictor, Trainer, open_safetensors


class Attention(nnx.Module):
    """Attention to earlier words with rotary positions; several heads of queries share a head of keys and values."""

    def __init__(self, config: dict, rngs: nnx.Rngs):
        width, self.size = config["hidden_size"], config["head_dim"]
        self.theta = config["rope_parameters"]["rope_theta"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nnx.Linear(width, heads * self.size, use_bias=False, rngs=rngs)
        self.k_proj = nnx.Linear(width, kv_heads * self.size, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(width, kv_heads * self.size, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(heads * self.size, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, self.size) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = jax.nn.dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))

    def rotate(self, x):
        frequencies = self.theta ** -(jax.numpy.arange(0, self.size, 2) / self.size)
        angles = jax.numpy.arange(x.shape[1])[:, None, None] * frequencies
        first, second = jax.numpy.split(x, 2, axis=-1)
        cos, sin = jax.numpy.cos(angles), jax.numpy.sin(angles)
        return jax.numpy.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Mlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: dict, rngs: nnx.Rngs):
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, config: dict, rngs: nnx.Rngs):
        self.input_layernorm, self.post_attention_layernorm = (
            nnx.RMSNorm(config["hidden_size"], epsilon=config["rms_norm_eps"], rngs=rngs) for _ in range(2)
        )
        self.self_attn = Attention(config, rngs)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Its attributes have the names of transformers; by these names its layers are sharded, too."""

    def __init__(self, config: dict, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(config["vocab_size"], config["hidden_size"], rngs=rngs)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(config["hidden_size"], epsilon=config["rms_norm_eps"], rngs=rngs)
        self.lm_head = nnx.Linear(config["hidden_size"], config["vocab_size"], use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def name_of(path: tuple) -> str:
    """Return the name that transformers has for a parameter: the weight of layers/0/mlp/up_proj/kernel."""
    name = ".".join([*map(str, path[:-1]), "weight"])
    return name if name.startswith("lm_head") else f"model.{name}"


def load_llama(folder: Path) -> Llama:
    """Open the weights of a LLaMA. Nothing is read here: each worker reads the shards of its devices."""
    stored = open_safetensors(folder)
    config = json.loads((folder / "config.json").read_text())
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0))))
    found = {}
    for path, variable in nnx.to_flat_state(state):
        weight = stored[name_of(path)]
        found[path] = variable.replace(weight.T if path[-1] == "kernel" else weight)
    return nnx.merge(graph, nnx.from_flat_state(found))


def save_llama(model: Llama, config: Path, folder: Path) -> None:
    """Write the weights for `LlamaForCausalLM.from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        weight = np.asarray(variable.get_value())
        weights[name_of(path)] = np.ascontiguousarray(weight.T if path[-1] == "kernel" else weight)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(config, folder)


def make_random_weights(folder: Path, vocabulary: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=False, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)


def difference_from_transformers(logits: list, folder: Path, ids: np.ndarray) -> float:
    """Return the largest difference of logits from those of transformers with the weights in a folder."""
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(folder)(torch.as_tensor(ids).long()).logits
    return float(np.abs(np.stack(logits) - expected.float().numpy()).max())


def collate_fn(examples, vocabulary):
    return {"ids": vocabulary.encode([example["text"] for example in examples], LENGTH, has_end=True)}


def loss_fn(model, batch):
    targets = batch["ids"][:, 1:]
    is_word = targets != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["ids"])[:, :-1], targets)
    return (losses * is_word).sum(), is_word.sum()  # for each word, whatever the lengths of the rows


def pred_fn(model, batch):
    return model(batch["ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--output", type=Path, default=Path(tempfile.mkdtemp()) / "trained")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--n-model-shards", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    train_examples, eval_examples = load_dataset(1536, seed=1), load_dataset(101, seed=2)
    vocabulary = Vocabulary(example["text"] for example in train_examples)
    collate = partial(collate_fn, vocabulary=vocabulary)
    if args.weights is None:
        args.weights = Path(tempfile.mkdtemp())
        make_random_weights(args.weights, len(vocabulary))
    model = load_llama(args.weights)
    ids = collate(eval_examples[:8])["ids"]

    with Deployer(jax_seed=0, num_workers=args.workers, n_model_shards=args.n_model_shards) as deployer:
        logits = Predictor(deployer, collate, pred_fn).predict(eval_examples[:8], 8, model)
        print(f"difference when loaded: {difference_from_transformers(logits, args.weights, ids):.1e}")
        trainer = Trainer(deployer, collate, loss_fn=loss_fn, params=model, optimizer=optax.adam(2e-3))
        results = trainer.fit(
            train_examples, 32, args.epochs, eval_examples=eval_examples, eval_per_device_batch_size=64
        )
        save_llama(results.params, args.weights / "config.json", args.output)
        logits = trainer.get_default_predictor(pred_fn).predict(eval_examples[:8], 8)
        print(f"difference when trained: {difference_from_transformers(logits, args.output, ids):.1e}")
    baseline = perplexity_of_bigrams(train_examples, eval_examples)
    print(f"perplexity: {np.exp(results.metrics['eval_loss']):.3f} (bigrams: {baseline:.3f})")


if __name__ == "__main__":
    main()
