"""`MemoryUse`: what the training state and the activations of a rank take in memory, measured from its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from raysgd.engine.model.local_tensors import local_of
from raysgd.torch.model import unwrap

_ROWS = ("parameters", "gradients", "optimizer")
_ACTIVATIONS = "kept_activations"


class Bytes(Protocol):
    """Bytes of a training state, such as a `MemoryUse` or what `raysgd.engine.predict_memory` returns."""

    @property
    def parameters(self) -> float: ...

    @property
    def gradients(self) -> float: ...

    @property
    def optimizer(self) -> float: ...

    @property
    def kept_activations(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of a rank's training state, on its device and in host memory together. Printed it is a table.

    Attributes:
        parameters: Those that the model computes with, and its buffers.
        gradients: Those that exist now; none after ``zero_grad()``.
        optimizer: Its state, and the fp32 copies of parameters that are in bf16.
        kept_activations: What was in memory for the backward pass when it began, without the batch; None unless
            `Engine.measure_activations` measured it. Of the micro-batches of a pipeline, as many as were kept at a time.
    """

    parameters: int
    gradients: int
    optimizer: int
    kept_activations: int | None = None

    @property
    def total(self) -> int:
        """The sum of all that was measured."""
        return self.parameters + self.gradients + self.optimizer + (self.kept_activations or 0)

    def table(self, **columns: Bytes) -> str:
        """Return a table of megabytes (10^6 bytes), with more columns: ``predicted=raysgd.engine.predict_memory(...)``."""
        of_columns: dict[str, Bytes] = {"measured": self, **columns}
        rows = [("MB", *of_columns)]
        names = _ROWS if self.kept_activations is None else (*_ROWS, _ACTIVATIONS)
        bytes_of = {name: [getattr(each, name) or 0 for each in of_columns.values()] for name in names}
        bytes_of["total"] = [sum(sizes) for sizes in zip(*bytes_of.values(), strict=True)]
        rows += [
            (name.replace("_", " "), *(f"{size / 1e6:,.3f}" for size in sizes)) for name, sizes in bytes_of.items()
        ]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
            )
            for row in rows
        )

    def __str__(self) -> str:
        return self.table()


def measure(
    parameters: Collection[torch.Tensor],
    updated: Collection[torch.Tensor],
    state: Iterable[torch.Tensor],
    kept_activations: int | None = None,
) -> MemoryUse:
    """Measure tensors: of a DTensor this rank's part, and memory that several share once.

    Args:
        parameters: Of the model.
        updated: What the optimizer updates in place of parameters.
        state: The optimizer's.
        kept_activations: As measured by `KeptActivations`.
    """
    seen: set[tuple[torch.device, int]] = set()
    gradients = (each.grad for each in (*parameters, *updated) if each.grad is not None)
    return MemoryUse(
        parameters=_num_bytes(parameters, seen),
        gradients=_num_bytes(gradients, seen),
        optimizer=_num_bytes((*updated, *state), seen),
        kept_activations=kept_activations,
    )


def _num_bytes(tensors: Iterable[torch.Tensor], seen: set[tuple[torch.device, int]]) -> int:
    """Return the bytes of storages that are not in ``seen``, and add them to it."""
    found = 0
    for tensor in tensors:
        storage = (local := local_of(tensor)).untyped_storage()
        key = local.device, storage.data_ptr()
        if storage.nbytes() and key not in seen:
            seen.add(key)
            found += storage.nbytes()
    return found


class KeptActivations:
    """Measures what forward passes of a model keep for their backward passes.

    That is what autograd saves, and the model's outputs.

    Tensors are counted when a backward pass begins, so that those count which are in memory then. Parameters are not, nor
    what FSDP has gathered of them, nor what the model was called with.

    Attributes:
        num_bytes: The largest amount in memory at the beginning of a backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._inputs: dict[int, torch.UntypedStorage] = {}  # held, so that no other storage gets their keys
        self._is_forward = False
        self.num_bytes = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the steps of a ``with`` block."""
        hooks = (
            self._model.register_forward_pre_hook(self._note_inputs, with_kwargs=True),
            unwrap(self._model).register_forward_hook(
                self._note_outputs
            ),  # a stage of a pipeline is called several times
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._inputs.clear()

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs |= {storage._cdata: storage for storage in _storages_in((args, kwargs))}

    def _note_outputs(self, module: nn.Module, args: Any, out: Any) -> None:
        self._note(out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._begin_backward())  # type: ignore[no-untyped-call]

    def _note(self, tree: Any) -> None:
        self._is_forward = True
        self._kept |= {storage._cdata: weakref.ref(storage) for storage in _storages_in(tree)}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(tensor)
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._begin_backward()
        return tensor

    def _begin_backward(self) -> None:
        """Count, if this is the first tensor that a backward pass needs or has computed."""
        if self._is_forward:
            self._is_forward = False
            self.num_bytes = max(self.num_bytes, self._count())

    def _count(self) -> int:
        own = _storages_in([*self._model.parameters(), *self._model.buffers()])
        others = {storage._cdata for storage in own} | self._inputs.keys()
        alive = {key: storage for key, ref in self._kept.items() if (storage := ref()) is not None}
        self._kept = {key: self._kept[key] for key in alive}
        return sum(storage.nbytes() for key, storage in alive.items() if key not in others)


def _storages_in(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in nested containers, of a DTensor that of this rank's part."""
    found = []
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            found += _storages_in([getattr(leaf, name) for name in names])
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf.untyped_storage())
    return found
