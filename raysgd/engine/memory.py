"""`MemoryUse`: what the training state of a rank takes in memory, measured from its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

_ROWS = ("parameters", "gradients", "optimizer")


class Bytes(Protocol):
    """Bytes of a training state, such as a `MemoryUse` or what `raysgd.engine.predict_memory` returns."""

    @property
    def parameters(self) -> float: ...

    @property
    def gradients(self) -> float: ...

    @property
    def optimizer(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of a rank's training state, on its device and in host memory together.

    Printed it is a table. Activations are not in it: they exist during a step only.

    Attributes:
        parameters: Those that the model computes with, and its buffers.
        gradients: Those that exist now; none after ``zero_grad()``.
        optimizer: Its state, and the fp32 copies of parameters that are in bf16.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def table(self, **columns: Bytes) -> str:
        """Return a table of megabytes (10^6 bytes), with more columns: ``predicted=raysgd.engine.predict_memory(...)``."""
        of_columns: dict[str, Bytes] = {"measured": self, **columns}
        rows = [("MB", *of_columns)]
        bytes_of = {name: [getattr(each, name) for each in of_columns.values()] for name in _ROWS}
        bytes_of["total"] = [sum(sizes) for sizes in zip(*bytes_of.values(), strict=True)]
        rows += [(name, *(f"{size / 1e6:,.3f}" for size in sizes)) for name, sizes in bytes_of.items()]
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
    parameters: Iterable[torch.Tensor], pieces: Iterable[torch.Tensor], state: Iterable[torch.Tensor]
) -> MemoryUse:
    """Measure tensors: of a DTensor this rank's part, and memory that several share once.

    Args:
        parameters: Of the model.
        pieces: What the optimizer updates in place of parameters.
        state: The optimizer's.
    """
    parameters, pieces = list(parameters), list(pieces)
    seen: set[tuple[torch.device, int]] = set()
    gradients = (each.grad for each in (*parameters, *pieces) if each.grad is not None)
    return MemoryUse(
        parameters=_num_bytes(parameters, seen),
        gradients=_num_bytes(gradients, seen),
        optimizer=_num_bytes((*pieces, *state), seen),
    )


def _num_bytes(tensors: Iterable[torch.Tensor], seen: set[tuple[torch.device, int]]) -> int:
    """Return the bytes of storages that are not in ``seen``, and add them to it."""
    found = 0
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = local.device, storage.data_ptr()
        if storage.nbytes() and key not in seen:
            seen.add(key)
            found += storage.nbytes()
    return found
