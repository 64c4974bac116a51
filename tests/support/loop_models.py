"""The models, the optimizer and the order of rows of drawn loops; see `support.loop_runs`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

VOCABULARY = 11
TOO_LARGE = 1e20  # for a gradient in fp16


class Multiply(torch.autograd.Function):
    """Multiplies gradients, not values."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class Block(nn.Module):
    def __init__(self, width: int, options: set[str]) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width, eps=0.1) if "norm" in options else nn.Identity()
        self.dropout = nn.Dropout(0.3 if "dropout" in options else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.down(torch.tanh(self.up(x))))))


class Net(nn.Module):
    """Layers around blocks, of which a batch may use some, a scalar, and a buffer."""

    shift: torch.Tensor

    def __init__(self, numbers: random.Random, options: set[str]) -> None:
        super().__init__()
        self.width = numbers.choice([4, 6])
        self.first = nn.Linear(3, self.width)
        self.blocks = nn.ModuleList(Block(self.width, options) for _ in range(2))
        self.last = nn.Linear(self.width, 1)
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.register_buffer("shift", torch.linspace(0.5, -0.5, self.width))
        self.extra: nn.Module | None = None
        self.options = options
        self.overflows = False

    def forward(self, x: torch.Tensor, branch: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        if "shift" in self.options:
            hidden = hidden + self.shift
        has_branches = any(each.startswith("branch") for each in self.options)
        for number, block in enumerate(self.blocks):
            is_left_out = ("unused" in self.options and number == 1) or (has_branches and number != branch)
            if not is_left_out:
                hidden = block(hidden)
        if self.extra is not None:
            hidden = torch.tanh(self.extra(hidden))
        if self.overflows:
            hidden = Multiply.apply(hidden, TOO_LARGE)  # type: ignore[no-untyped-call]
        return self.gain * self.last(hidden), hidden


def make_llama() -> nn.Module:
    """Make a model of which a pipeline can have stages."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=8))


class RowsFrom(Sampler[int]):
    """The rows of an epoch in their order, from any one on, as a user's loop resumes."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.first = num_rows, 0

    def __len__(self) -> int:
        return self.num_rows - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.num_rows))


class Exchanging(torch.optim.Optimizer):
    """Stochastic gradient descent whose average of weights is evaluated, as schedule-free optimizers do it."""

    def __init__(self, parameters: Any, lr: float = 0.05, beta: float = 0.8) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "is_training": True, "count": 0})

    def _each(self) -> Iterator[tuple[dict[str, Any], Any, dict[str, Any]]]:
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["z"], state["x"] = each.detach().clone(), each.detach().clone()
                yield group, each, state

    @torch.no_grad()
    def eval(self) -> None:
        for group, each, state in self._each():
            if group["is_training"]:
                each.copy_(state["x"])
        self._set(False)

    @torch.no_grad()
    def train(self) -> None:
        for group, each, state in self._each():
            if not group["is_training"]:
                each.copy_(state["z"].lerp(state["x"], group["beta"]))
        self._set(True)

    def _set(self, is_training: bool) -> None:
        for group in self.param_groups:
            group["is_training"] = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
        for group, each, state in self._each():
            if each.grad is not None:
                state["z"].sub_(each.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / (group["count"] + 1))
                each.copy_(state["z"].lerp(state["x"], group["beta"]))
