"""Looks for nodes that will be taken away, while the workers of an attempt are on them. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysgd.workers.drains import Drains

#: Seconds between two looks.
LOOK_S = 2.0


class DrainWatch:
    """One attempt's watch; `run` goes on until it is cancelled.

    Args:
        on_drain: Called with ranks that are new among them, and their seconds.
    """

    def __init__(self, drains: Drains, on_drain: Callable[[tuple[int, ...], float | None], None]) -> None:
        self._drains = drains
        self._on_drain = on_drain
        self._known: set[int] = set()

    async def run(self) -> None:
        """Watch."""
        while True:
            found = await self._drains.ranks()
            by_time: dict[float | None, list[int]] = {}
            for rank in sorted(found.keys() - self._known):
                by_time.setdefault(found[rank], []).append(rank)
            self._known |= found.keys()
            for within_s, ranks in by_time.items():
                self._on_drain(tuple(ranks), within_s)
            await asyncio.sleep(LOOK_S)
