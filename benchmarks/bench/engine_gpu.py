"""The training step of GPT-2 on one device: by hand with torch, with the engine, with Accelerate and with Fabric. No Ray."""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import raysgd

#: Makes one optimizer step.
Step = Callable[[], None]
#: Dense bf16 products per second of a device, as its maker's data sheet gives them, by a part of its name.
_PEAKS = {"H100 PCIe": 756e12, "H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT-2 and of its batch, [batch, sequence] tokens."""

    layers: int
    hidden: int
    heads: int
    batch: int
    sequence: int = 1024
    vocabulary: int = 50257


SHAPES = {"124M": Shape(12, 768, 12, 16), "350M": Shape(24, 1024, 16, 8)}
QUICK_SHAPES = {"tiny": Shape(2, 32, 2, 2, sequence=16, vocabulary=97)}


def make_model(shape: Shape, device: str) -> nn.Module:
    """Make a GPT-2 with random weights and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.sequence,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).to(device)


def make_optimizer(model: nn.Module, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device != "cpu")


def flops_per_token(model: nn.Module, shape: Shape) -> float:
    """Return the operations of forward and backward per token, without recomputed ones.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return 6 * num_parameters + 12 * shape.layers * shape.hidden * shape.sequence


def peak_flops(device: str) -> float | None:
    """Return what the device can do per second; None if this is not known."""
    name = torch.cuda.get_device_name() if device != "cpu" else ""
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


# -- the loops -----------------------------------------------------------------------------------------------------------


def by_hand(shape: Shape, device: str, compiles: bool) -> Step:
    """Write it with torch alone."""
    model = make_model(shape, device)
    optimizer, tokens = make_optimizer(model, device), make_tokens(shape, device)
    called = torch.compile(model) if compiles else model

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_engine(shape: Shape, device: str, compiles: bool) -> Step:
    """Write it with raysgd's engine."""
    engine = raysgd.Engine(precision="bf16", compile="model" if compiles else None)
    model = make_model(shape, device)
    model, optimizer, *_ = engine.compose(model=model, optimizer=make_optimizer(model, device))
    tokens = make_tokens(shape, device)

    def step() -> None:
        engine.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_accelerate(shape: Shape, device: str, compiles: bool) -> Step:
    """Write it with Hugging Face Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=device == "cpu", dynamo_backend="inductor" if compiles else "no"
    )
    model = make_model(shape, device)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, device))
    tokens = make_tokens(shape, device)

    def step() -> None:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_fabric(shape: Shape, device: str, compiles: bool) -> Step:
    """Write it with Lightning Fabric."""
    try:
        from lightning_fabric import Fabric
    except ImportError:
        from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu" if device == "cpu" else "cuda", devices=1, precision="bf16-mixed")
    model = make_model(shape, device)
    optimizer, tokens = make_optimizer(model, device), make_tokens(shape, device)
    model, optimizer = fabric.setup(torch.compile(model) if compiles else model, optimizer)

    def step() -> None:
        fabric.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: dict[str, Callable[[Shape, str, bool], Step]] = {
    "by_hand": by_hand,
    "engine": with_engine,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
}


def make_tokens(shape: Shape, device: str) -> torch.Tensor:
    """Make a batch of token numbers, [batch, sequence]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (shape.batch, shape.sequence), generator=generator).to(device)


def measure(shape: Shape, device: str, *, rounds: int, steps: int, compiles: bool) -> dict[str, Any]:
    """Take the time of steps of all loops in turn, in one process.

    Args:
        shape: The model and its batch.
        device: ``"cuda"`` or ``"cpu"``.
        rounds: In each of them every loop makes ``steps`` steps, in a random order.
        steps: Steps of a round.
        compiles: Whether all loops compile the model.

    Returns:
        ``seconds``: of each loop the seconds of a step in each round. ``missing``: why a loop was left out.
        ``flops_per_token``.
    """
    warnings.filterwarnings("ignore")
    loops: dict[str, Step] = {}
    missing: dict[str, str] = {}
    for name, make in LOOPS.items():
        try:
            loops[name] = make(shape, device, compiles)
            loops[name]()
        except ImportError as error:
            missing[name] = str(error)
    taken: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    for number in range(rounds + 1):
        for name in order.sample(sorted(loops), len(loops)):
            _wait(device)
            began = time.perf_counter()
            for _ in range(steps):
                loops[name]()
            _wait(device)
            if number:  # the first round warms up
                taken[name].append((time.perf_counter() - began) / steps)
    gc.enable()
    return {"seconds": taken, "missing": missing, "flops_per_token": flops_per_token(make_model(shape, "cpu"), shape)}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
