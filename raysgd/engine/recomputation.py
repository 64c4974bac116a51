"""Activation checkpointing: blocks are computed again in the backward pass, in full or but for their costly operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raysgd.engine.attached import AttachedForward

_ATEN = torch.ops.aten
#: What ``"selective"`` keeps: matrix products and attention, which cost the most to compute again.
KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN.convolution.default,
}
#: Called with each output that ``"selective"`` keeps in a forward pass, which is not among what autograd saves.
on_kept: list[Callable[[Any], None]] = []


def recompute(blocks: Iterable[nn.Module], *, selective: bool) -> None:
    """Make blocks forget their activations after the forward pass; with ``selective`` all but those in `KEPT`.

    The blocks keep their classes and the names of their parameters. Random numbers are the same in both computations.
    """
    more = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    for block in blocks:
        block.forward = _recomputed(block, block.forward, more)


def _recomputed(block: nn.Module, forward: Any, more: dict[str, Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    return AttachedForward(forward, call)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation not in KEPT:
        return CheckpointPolicy.PREFER_RECOMPUTE
    for callback in on_kept:
        callback(context.op_output)
    return CheckpointPolicy.MUST_SAVE
