"""Leaves: the tensors, arrays and long byte strings of a state, which are stored beside its JSON.

Runs in workers and drivers. Imports no NumPy: the control plane reads manifests through the modules above this one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ByteArray: TypeAlias = "NDArray[np.uint8]"

_MAX_NAME = 512


@dataclass(slots=True)  # not frozen: states of ten thousand tensors make as many of these while training waits
class Leaf:
    """Something to be copied into a file.

    Attributes:
        path: Keys from the root of the state.
        dtype: Of the stored tensor, by its safetensors name.
        shape: Of the stored tensor.
        num_bytes: That it takes.
        item_bytes: Alignment that a view on it needs.
        source: What holds the data; kept alive until it is copied.
        fill: Called with ``source`` and a byte array of ``num_bytes``, copies the one into the other.
        key: Leaves of equal keys are the same memory and are stored once; None: never shared.
        device: Accelerator whose copy `fill` only starts; whoever reads the bytes waits for it.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    item_bytes: int
    source: Any
    fill: Callable[[Any, ByteArray], None]
    key: Hashable = None
    device: Any = None

    @staticmethod
    def of_bytes(data: bytes, path: Sequence[Any]) -> Leaf:
        return Leaf(tuple(path), "U8", (len(data),), len(data), 1, data, _fill_bytes)


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf as it was read.

    Attributes:
        dtype: By its safetensors name.
        shape: As stored.
        data: Its bytes, one-dimensional, writable and aligned.
    """

    dtype: str
    shape: tuple[int, ...]
    data: ByteArray


def _fill_bytes(data: bytes, area: ByteArray) -> None:
    area.data[:] = data


class LeafWriter(Protocol):
    """Where an `Encoder` leaves its leaves."""

    def add(self, leaf: Leaf) -> Any:
        """Take a leaf and return the JSON by which the tree refers to it."""


class LeafSource(Protocol):
    """Where a `Decoder` gets them from."""

    def get(self, reference: Any) -> StoredLeaf:
        """The leaf of a reference; KeyError, TypeError or ValueError where there is none."""


class LeafList:
    """Collects leaves for a file of their own and names them after their place: ``model.0.weight``."""

    def __init__(self) -> None:
        self.named: dict[str, Leaf] = {}
        self._stored: dict[Hashable, str] = {}

    def add(self, leaf: Leaf) -> str:
        name = None if leaf.key is None else self._stored.get(leaf.key)
        if name is None:
            name = self._free_name(leaf.path)
            self.named[name] = leaf
            if leaf.key is not None:
                self._stored[leaf.key] = name
        return name

    def _free_name(self, path: tuple[Any, ...]) -> str:
        text = ".".join(str(part) for part in path) or "state"
        if len(text) > _MAX_NAME or not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode()[:_MAX_NAME]
        name = text
        count = 1
        while name in self.named or name == "__metadata__":  # keys 1 and "1", say
            count += 1
            name = f"{text}~{count}"
        return name
