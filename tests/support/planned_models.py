"""Eight small models of different kinds, whose memory is predicted and measured. They are made from configurations: nothing
is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

VOCABULARY = 1000
LENGTH = 64
WIDTH = 128


@dataclass(frozen=True)
class SmallModel:
    """A model and its batches.

    Attributes:
        make: Makes the model.
        shapes: Shapes of a batch of one row, by argument; integers below 1000 unless the name is in `floats`.
        floats: Arguments of random floats.
        num_rows: Rows of a batch whose activations are not small compared with the parameters.
    """

    make: Callable[[], nn.Module]
    shapes: dict[str, tuple[int, ...]]
    floats: frozenset[str] = frozenset()
    num_rows: int = 4

    def batch(self, num_rows: int, *, labels: int = VOCABULARY) -> dict[str, torch.Tensor]:
        return {
            name: torch.randn(num_rows, *shape)
            if name in self.floats
            else torch.randint(0, 2 if name == "labels" and not shape else labels, (num_rows, *shape))
            for name, shape in self.shapes.items()
        }


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.classifier(self.encoder(self.embedding(input_ids)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Residual(nn.Module):
    """A layer of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 8 * WIDTH)
        self.fc2 = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


class Perceptron(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual() for _ in range(6)])
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.classifier(x), labels)


class Convolutional(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        stages: list[nn.Module] = []
        for before, after in pairwise(widths):
            stages += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(128 * 16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.classifier(self.stages(x).flatten(1)), labels)


def small_models() -> dict[str, SmallModel]:
    """Return the models by name. transformers is imported here, since that takes seconds."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    text: dict[str, tuple[int, ...]] = {"input_ids": (LENGTH,), "labels": (LENGTH,)}
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
    }
    gpt2 = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=4, n_head=4)
    llama = LlamaConfig(**{**sizes, "num_attention_heads": 8}, intermediate_size=3 * WIDTH, num_key_value_heads=4)
    bert = BertConfig(**sizes, intermediate_size=4 * WIDTH)
    opt = OPTConfig(**sizes, ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH, max_position_embeddings=LENGTH)
    t5 = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // 4,
        d_ff=4 * WIDTH,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return {
        "gpt2": SmallModel(lambda: GPT2LMHeadModel(gpt2), text),
        "llama": SmallModel(lambda: LlamaForCausalLM(llama), text),
        "bert": SmallModel(lambda: BertForSequenceClassification(bert), {"input_ids": (LENGTH,), "labels": ()}),
        "t5": SmallModel(lambda: T5ForConditionalGeneration(t5), text),
        "opt": SmallModel(lambda: OPTForCausalLM(opt), text),
        "encoder": SmallModel(Encoder, text),
        "mlp": SmallModel(Perceptron, {"x": (WIDTH,), "labels": ()}, frozenset({"x"}), 512),
        "cnn": SmallModel(Convolutional, {"x": (3, 32, 32), "labels": ()}, frozenset({"x"}), 32),
    }
