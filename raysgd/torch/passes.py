"""Batches that are recognized by their tensors when a model is called with them. Worker side."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.session import context
from raysgd.torch.attached import AttachedHook
from raysgd.torch.batches import leaves_of

#: Where tensors begin: their storage, and the place in it.
_Places = frozenset[tuple[StorageWeakRef, int]]
_followed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def places_of(tree: Any) -> _Places:
    """Return where the tensors of a batch, or of the arguments of a model, begin in memory."""
    return frozenset(
        (StorageWeakRef(each.untyped_storage()), int(each.storage_offset()))  # type: ignore[no-untyped-call]
        for each in _tensors_of(tree)
    )


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree that have memory of their own."""
    return [
        each
        for each in leaves_of(tree)
        if isinstance(each, torch.Tensor)
        and not is_dtensor(each)
        and each.layout == torch.strided
        and not is_functorch_wrapped_tensor(each)
    ]


class HandedBatch:
    """A batch that a loader has handed out. It is recognized by its tensors, which it does not keep in memory.

    Args:
        batch: Its tensors.
        num_rows: How many of its rows count on this rank.
        is_last: Whether it is the last one of its loader.
    """

    def __init__(self, batch: Any, num_rows: int, *, is_last: bool = False) -> None:
        self.num_rows, self.is_last = num_rows, is_last
        self._places = places_of(batch)

    def is_alive(self) -> bool:
        """Return whether anything refers to one of its tensors; True if it has none."""
        return not self._places or any(not storage.expired() for storage, _ in self._places)  # type: ignore[no-untyped-call]

    def has_any(self, places: _Places, *, is_exact: bool) -> bool:
        """Return whether one of its tensors begins at one of these places, or is in the same memory if not ``is_exact``."""
        if is_exact:
            return not self._places.isdisjoint(places)
        return not {storage for storage, _ in self._places}.isdisjoint(storage for storage, _ in places)


class _DatasetBatch(HandedBatch):
    """A batch of a dataset, of tensors or of NumPy arrays, whose memory tensors may share."""

    def __init__(self, batch: Any) -> None:
        super().__init__(batch, 0)
        arrays = [each for each in leaves_of(batch) if isinstance(each, np.ndarray)]
        self._arrays = [(weakref.ref(each), *np.lib.array_utils.byte_bounds(each)) for each in arrays]

    def is_alive(self) -> bool:
        return (bool(self._places) and super().is_alive()) or any(array() is not None for array, *_ in self._arrays)

    def is_among(self, places: _Places, inputs: Any) -> bool:
        """Return whether one of its tensors or arrays is among the inputs of a model, which are at these places."""
        if self._places and self.has_any(places, is_exact=False):
            return True
        living = [(begin, end) for array, begin, end in self._arrays if array() is not None]
        addresses = [each.data_ptr() for each in _tensors_of(inputs) if each.device.type == "cpu"] if living else []
        return any(begin <= address < end for begin, end in living for address in addresses)


def follow_passes(model: nn.Module) -> None:
    """Let the datasets of the session see which of their batches a model is called with."""
    context.current().passes.describe = _DatasetBatch
    if model not in _followed and not isinstance(model, torch.jit.ScriptModule):
        _followed.add(model)
        model.register_forward_pre_hook(AttachedHook(_on_pass), with_kwargs=True, prepend=True)


def show_pass(inputs: Any, *, is_training: bool) -> None:
    """A model is called with these inputs, so that gradients are computed."""
    passes = context.current().passes
    if passes.has_unused():
        places = places_of(inputs)
        passes.on_pass(lambda batch: batch.is_among(places, inputs), is_training=is_training)


def _on_pass(module: nn.Module, *inputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    is_evaluation = not (torch.is_grad_enabled() or module.training)
    context.current().progress.on_pass(partial(_trains, weakref.ref(module)) if is_evaluation else None)
    if torch.is_grad_enabled():
        show_pass(inputs, is_training=module.training)


def _trains(module: weakref.ref[nn.Module]) -> bool:
    model = module()
    return model is None or model.training
