"""What a driver gives to the workers of its run while the run is live, piece by piece. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from typing import Any

#: Seconds that one question waits; a worker asks again, so that it shows that it runs.
_WAIT_S = 5.0


class GivenPieces:
    """The pieces, by number. They stay until no checkpoint needs them that workers may resume from."""

    def __init__(self) -> None:
        self._pieces: dict[int, Any] = {}
        self._changed = asyncio.Condition()

    async def give(self, number: int, piece: Any, kept_from: int) -> None:
        """Keep a piece for all ranks, and of the others those from ``kept_from`` on."""
        async with self._changed:
            self._pieces = {old: each for old, each in self._pieces.items() if old >= kept_from} | {number: piece}
            self._changed.notify_all()

    async def take(self, number: int) -> Any:
        """Return a piece, or None if it does not come within some seconds."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: number in self._pieces), _WAIT_S)
            except TimeoutError:
                return None
            return self._pieces[number]
