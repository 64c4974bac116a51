"""Tiny models with random weights and their batches, and training loops over them, for tests of the engine's strategies."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

STEPS = 20
#: Steps of which gradients are compared too, not only losses.
COMPARED = (0, 1, STEPS - 1)
ROWS, LENGTH, HIDDEN, VOCABULARY = 8, 12, 32, 96
#: Models for which transformers has a tensor-parallel plan, by model type, with what is particular to them.
PLANNED: dict[str, dict[str, Any]] = {
    "cohere": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {},
    "gpt_neox": {},
    "granite": {},
    "mistral": {},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "starcoder2": {"num_key_value_heads": 4},
}


class EncoderModel(nn.Module):
    """An ``nn.TransformerEncoder`` that classifies sequences."""

    def __init__(self, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(200, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 64, dropout, batch_first=batch_first, norm_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, 3)
        self.batch_first = batch_first

    def forward(self, input_ids: Tensor, padding: Tensor, labels: Tensor) -> Any:
        embedded = self.words(input_ids)
        if self.batch_first:
            pooled = self.encoder(embedded, src_key_padding_mask=padding).mean(1)
        else:
            pooled = self.encoder(embedded.transpose(0, 1), src_key_padding_mask=padding).mean(0)
        return Outputs(nn.functional.cross_entropy(self.head(pooled), labels))


class DecoderModel(nn.Module):
    """An ``nn.Transformer``, whose decoder attends to the encoder."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.transformer = nn.Transformer(HIDDEN, 4, 1, 2, 64, dropout, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, padding: Tensor, labels: Tensor) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
        hidden = self.transformer(
            self.words(input_ids),
            self.words(labels),
            tgt_mask=causal,
            src_key_padding_mask=torch.zeros(padding.shape).masked_fill(padding, float("-inf")),
            tgt_is_causal=True,
        )
        logits = self.head(hidden[:, :-1])
        return Outputs(nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


class Outputs:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@functools.cache
def _transformers() -> Any:
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def build(
    kind: str, seed: int = 0, dropout: float = 0.0, num_blocks: int = 2, vocabulary: int = VOCABULARY
) -> nn.Module:
    """Make a tiny model."""
    torch.manual_seed(seed)
    if kind == "encoder":
        return EncoderModel(dropout)
    if kind == "encoder, sequence first":
        return EncoderModel(dropout, batch_first=False)
    if kind == "encoder and decoder":
        return DecoderModel(dropout)
    hf = _transformers()
    sizes = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind in ("gpt2", "gpt2, eager"):
        config = hf.GPT2Config(
            n_layer=num_blocks, n_head=4, n_embd=HIDDEN, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, attn_implementation="eager" if "eager" in kind else "sdpa", **sizes,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config)
    if kind in ("llama", "llama, biased and tied"):
        config = hf.LlamaConfig(
            num_hidden_layers=num_blocks, num_attention_heads=4, num_key_value_heads=2, hidden_size=HIDDEN,
            intermediate_size=48, attention_dropout=dropout, attention_bias="biased" in kind, mlp_bias="biased" in kind,
            tie_word_embeddings="tied" in kind, **sizes,
        )  # fmt: skip
        return hf.LlamaForCausalLM(config)
    if kind in ("bert", "bert, classifier"):
        config = hf.BertConfig(
            num_hidden_layers=num_blocks, num_attention_heads=4, hidden_size=HIDDEN, intermediate_size=48,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3, **sizes,
        )  # fmt: skip
        return hf.BertForSequenceClassification(config) if "classifier" in kind else hf.BertForMaskedLM(config)
    if kind in ("bert to bert", "bert to gpt2"):
        encoder, decoder = (build(one, seed, dropout, num_blocks, vocabulary).config for one in kind.split(" to "))
        config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        return hf.EncoderDecoderModel(config)
    if kind in PLANNED or kind in ("minicpm3", "mixtral"):
        named = {"num_hidden_layers": num_blocks, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        named |= {"hidden_size": HIDDEN, "intermediate_size": 48, "attention_dropout": dropout, **sizes}
        named |= {"residual_dropout": dropout} if kind == "starcoder2" else {}
        return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **named | PLANNED.get(kind, {})))  # type: ignore[no-any-return]
    assert kind in ("t5", "t5, gated"), kind
    config = hf.T5Config(
        num_layers=num_blocks, num_heads=4, d_model=HIDDEN, d_kv=8, d_ff=48, dropout_rate=dropout,
        feed_forward_proj="gated-gelu" if "gated" in kind else "relu", tie_word_embeddings="gated" not in kind,
        decoder_start_token_id=0, **sizes,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def batch(
    kind: str, step: int, vocabulary: int = VOCABULARY, rows: int = ROWS, length: int = LENGTH, is_even: bool = False
) -> dict[str, Tensor]:
    """Make the batch of a step: rows of different lengths, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(3, vocabulary, (rows, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
    lengths[0] = length
    if is_even:
        lengths[:] = length
    padding = torch.arange(length) >= lengths[:, None]
    words[padding] = 0
    classes = torch.randint(0, 3, (rows,), generator=generator)
    if kind.startswith("encoder"):
        return {"input_ids": words, "padding": padding, "labels": words if "decoder" in kind else classes}
    found = {"input_ids": words, "attention_mask": (~padding).long()}
    if kind == "bert, classifier":
        return {**found, "labels": classes}
    labels = words.masked_fill(padding, -100)
    if kind == "bert" and not is_even:
        labels = labels.masked_fill(torch.rand(words.shape, generator=generator) < 0.6, -100)
    if kind.startswith("t5") or " to " in kind:
        labels = labels[:, : length // 2 + 2].contiguous()
    return {**found, "labels": labels}


def full(tensor: Tensor) -> Tensor:
    """Return all values of a tensor, wherever they lie."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an AdamW whose `eps` is above the rounding errors of gradients, which it would otherwise turn into whole steps."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6)


Gradients = dict[str, Tensor]


def train(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], step: Callable[[dict[str, Tensor]], Tensor] | None = None
) -> Iterator[tuple[float, Gradients]]:
    """Train, and yield each step's loss, with the gradients of some; a step is the plain one unless another is given."""
    model.train()
    optimizer = optimizer_of(model.parameters())
    for number, one in enumerate(batches):
        optimizer.zero_grad()
        if step is None:
            loss = model(**one).loss
            loss.backward()
        else:
            loss = step(one)
        named = model.named_parameters(remove_duplicate=False) if number in COMPARED else ()
        gradients = {name: full(one.grad).clone() for name, one in named if one.grad is not None}
        yield float(loss.detach()), gradients
        optimizer.step()


@functools.cache
def plain(kind: str, micro_batches: int | None = None, **options: Any) -> list[tuple[float, Gradients]]:
    """Train in one process without any strategy, by whole batches or by sums over micro-batches, weighted by their labels."""
    of_model, of_batch = split_options(options)
    model = build(kind, **of_model)

    def add_up(whole: dict[str, Tensor]) -> Tensor:
        num_labels, total = (whole["labels"] != -100).sum(), torch.zeros(())
        for labels, *others in zip(*(whole[key].chunk(micro_batches or 1) for key in ("labels", *whole)), strict=True):
            loss = model(**dict(zip(whole, others, strict=True))).loss * (labels != -100).sum() / num_labels
            loss.backward()
            total += loss.detach()
        return total

    batches = [batch(kind, step, **of_batch) for step in range(STEPS)]
    return list(train(model, batches, None if micro_batches is None else add_up))


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for `build`, and those for `batch`."""
    of_batch = {key: options[key] for key in ("vocabulary", "rows", "is_even") if key in options}
    return {key: value for key, value in options.items() if key not in ("rows", "is_even")}, of_batch


def differences(
    found: list[tuple[float, Gradients]], expected: list[tuple[float, Gradients]]
) -> tuple[float, float, float]:
    """Return the largest relative differences: of a loss; of a gradient of the first step; of one of a later step.

    Gradients are compared in relation to the norm of all gradients.
    """
    losses, gradients = [], [0.0] * len(found)
    for step, ((loss, own), (reference, theirs)) in enumerate(zip(found, expected, strict=True)):
        losses.append(abs(loss - reference) / abs(reference))
        if own:
            norm = torch.stack([one.norm() for one in theirs.values()]).norm()
            gradients[step] = max(float((one - theirs[name]).norm() / norm) for name, one in own.items())
    return max(losses), gradients[0], max(gradients[1:], default=0.0)


_meshes: weakref.WeakKeyDictionary[Any, dict[tuple[int, int, int], DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh(dp: int, pp: int, tp: int) -> DeviceMesh:
    """Return the mesh of the engine's axes over all ranks of the current process group."""
    made = _meshes.setdefault(torch.distributed.group.WORLD, {})
    if (dp, pp, tp) not in made:
        made[dp, pp, tp] = init_device_mesh("cpu", (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
    return made[dp, pp, tp]
