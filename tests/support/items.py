"""Map-style datasets."""

from __future__ import annotations

from typing import Any


class Listed:
    """A map-style dataset of these items."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]
