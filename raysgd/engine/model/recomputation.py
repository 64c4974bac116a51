"""Activation checkpointing: blocks are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raysgd.torch.attached import AttachedForward

#: Types of attributes that no forward pass can change in place.
_PLAIN = (bool, int, float, str, type(None))


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make blocks forget their activations after the forward pass.

    The blocks keep their classes and the names of their parameters. The second computation draws the same random numbers, finds
    buffers and attributes as the first one found them, and leaves them as they are when it begins.
    """
    for block in blocks:
        block.forward = _recomputed(block, block.forward)


def _recomputed(block: nn.Module, forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes operations, without those that write buffers
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        before: _Attributes | None = None

        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            if before is None:
                before = _Attributes(block)
                return forward(*args, **kwargs)
            with before.put_back():
                return forward(*args, **kwargs)

        return checkpoint(compute, *args, use_reentrant=False, **kwargs)

    return AttachedForward(forward, call)


class _Attributes:
    """The values of a block's modules before its forward pass: buffers and other tensors without gradients, numbers and flags.

    Tensors are copied. What holds a graph is not kept: it would keep the graph of the step before.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self._values = _copies(vars(module) for module in self._modules)
        self._buffers = _copies(module._buffers for module in self._modules)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Give the modules these values during a ``with`` block, and afterwards all attributes that they have now."""
        now = [vars(module).copy() for module in self._modules]
        try:
            for module, values, buffers in zip(
                self._modules, _copies(self._values), _copies(self._buffers), strict=True
            ):
                vars(module).update(values, _buffers=module._buffers | buffers)
            yield
        finally:
            for module, attributes in zip(self._modules, now, strict=True):
                vars(module).clear()
                vars(module).update(attributes)


def _copies(of_modules: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of modules that can be kept, with copies of tensors; a tensor of several modules stays one."""
    copies: dict[int, torch.Tensor] = {}
    found = []
    for values in of_modules:
        kept: dict[str, Any] = {name: each for name, each in values.items() if isinstance(each, _PLAIN)}
        for name, each in values.items():
            if isinstance(each, torch.Tensor) and not each.requires_grad:
                kept[name] = copies[id(each)] if id(each) in copies else copies.setdefault(id(each), each.clone())
        found.append(kept)
    return found
