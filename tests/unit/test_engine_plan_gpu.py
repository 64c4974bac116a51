"""What the plan says of a GPU, against the memory that a GPU has used."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from raysgd.engine.config import EngineConfig
from raysgd.engine.planning import predict_memory
from support.project import ROOT

WIDTH, HEADS, LENGTH, NUM_ROWS, VOCABULARY = 1024, 16, 1024, 16, 50257
#: By their names on the page, which has the figures of one H200. Selective recomputation was another one then.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full recomputation": {"activation_checkpointing": "full"},
    "bf16 parameters": {"precision": "bf16-true"},
    "ZeRO 3": {"zero_stage": 3},
}
MEASURED = {
    name: measured
    for name, _, measured in json.loads((ROOT / "doc/benchmarks/gpu.json").read_text())["engine"]["memory_gb"]
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).split(WIDTH, 2))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """The GPT of 350M parameters that was measured: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(24))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", CASES)
def test_predicted_memory_is_what_a_gpu_needs(name: str) -> None:
    config = EngineConfig(**{"precision": "bf16", **CASES[name]})
    shape = (NUM_ROWS, LENGTH)
    found = predict_memory(GPT, {"ids": shape, "labels": shape}, config, 1, device="cuda")
    assert all(found.total / 1e9 == pytest.approx(measured, rel=0.1) for measured in MEASURED[name])
