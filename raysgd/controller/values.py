"""What train_func returned, by rank: pickles that nobody opens here, or references to large ones."""

from __future__ import annotations

from typing import Any

from raysgd.session import events as e


class Values:
    """Of one attempt."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget those of ranks that had returned in an attempt that did not succeed."""
        self._by_rank.clear()

    def returned(self, rank: int, event: e.Returned) -> None:
        """A rank has returned; a large value follows."""
        if event.value is not None:
            self._by_rank[rank] = event.value

    def came(self, rank: int, value: Any) -> None:
        """A large value."""
        self._by_rank[rank] = value

    def first(self, count: int) -> list[Any]:
        """Those of the first ranks; None where there is none."""
        return [self._by_rank.get(rank) for rank in range(count)]
