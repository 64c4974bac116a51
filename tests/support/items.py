"""Items of datasets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Listed:
    """A map-style dataset of these items."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def aligned_buffer(size: int) -> NDArray[np.float32]:
    """Return memory with the alignment that frameworks need to use it without a copy."""
    memory = np.zeros(size + 16, np.float32)
    first = (-memory.ctypes.data % 64) // memory.itemsize
    return memory[first : first + size]
