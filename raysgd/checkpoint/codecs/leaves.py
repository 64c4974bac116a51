"""Leaves: the tensors, arrays and long byte strings of a state, which are stored next to its JSON.

Runs in workers and drivers. Imports no NumPy: the control plane reads manifests through modules that import this one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ByteArray: TypeAlias = "NDArray[np.uint8]"
Json: TypeAlias = Any

# safetensors dtype -> bytes of one element. F4 and the 6-bit types pack several elements into a byte and are not used.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
_MAX_NAME = 512


@dataclass(slots=True)  # not frozen, which is slow: training waits while a state of ten thousand tensors makes as many
class Leaf:
    """Data that is to be copied into a file.

    Attributes:
        path: Keys from the root of the state.
        dtype: Safetensors name of the stored dtype.
        shape: Shape of the stored tensor.
        num_bytes: Size of the stored tensor.
        item_bytes: Alignment that a view on the data needs.
        source: Object that holds the data; kept alive until it is copied.
        fill: Called as ``fill(source, area)``; copies the data into a byte array of ``num_bytes``.
        key: Leaves with equal keys are the same memory and are stored once. None: never shared.
        device: Accelerator on which `fill` only starts the copy; `synchronize` waits for it.
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
    """A leaf that was read.

    Attributes:
        dtype: Its safetensors name.
        shape: As stored.
        data: Its bytes: one-dimensional, writable and aligned.
    """

    dtype: str
    shape: tuple[int, ...]
    data: ByteArray


def _fill_bytes(data: bytes, area: ByteArray) -> None:
    area.data[:] = data


#: Takes a leaf, and returns the JSON by which the tree refers to it.
AddLeaf: TypeAlias = Callable[[Leaf], Json]
#: Returns the leaf of such a reference; KeyError, TypeError or ValueError if there is none.
GetLeaf: TypeAlias = Callable[[Json], StoredLeaf]


class LeafList:
    """Collects the leaves of one file and names them after their place in the state: ``model.0.weight``."""

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
        while name in self.named or name == "__metadata__":  # for example keys 1 and "1"
            count += 1
            name = f"{text}~{count}"
        return name
