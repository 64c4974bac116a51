"""Activation checkpointing: blocks are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raysgd.engine.attached import AttachedForward


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make blocks forget their activations after the forward pass.

    The blocks keep their classes and the names of their parameters. Random numbers are the same in both computations.
    """
    for block in blocks:
        block.forward = _recomputed(block, block.forward)


def _recomputed(block: nn.Module, forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return AttachedForward(forward, call)
