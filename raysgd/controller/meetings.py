"""Where ranks wait for each other: ``barrier`` and ``broadcast`` of any backend. Runs in the TrainerActor's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field


@dataclass
class _Meeting:
    payload: bytes = b""
    waiting: dict[int, asyncio.Future[bytes | None]] = field(default_factory=dict)


class Meetings:
    """The meetings of one attempt. A rank that has returned is not waited for."""

    def __init__(self, world_size: int) -> None:
        self._expected = set(range(world_size))
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._is_over = False

    async def join(self, rank: int, what: str, index: int, payload: bytes | None) -> bytes | None:
        """Wait for all ranks; rank 0's payload (empty if it has none, or was not there), None if the attempt ended first."""
        if self._is_over:
            return None
        meeting = self._meetings.setdefault((what, index), _Meeting())
        if payload is not None:
            meeting.payload = payload
        meeting.waiting[rank] = asyncio.get_running_loop().create_future()
        self._open_complete()
        return await meeting.waiting[rank]

    def left(self, rank: int) -> None:
        """``rank`` has returned. One that left in another way ends the attempt, and with it all meetings."""
        self._expected.discard(rank)
        self._open_complete()

    def end(self) -> None:
        """The attempt is over: nobody waits any longer."""
        self._is_over = True
        for meeting in self._meetings.values():
            self._resolve(meeting, None)
        self._meetings.clear()

    def _open_complete(self) -> None:
        complete: Set[tuple[str, int]] = {
            key for key, meeting in self._meetings.items() if self._expected <= set(meeting.waiting)
        }
        for key in complete:
            meeting = self._meetings.pop(key)
            self._resolve(meeting, meeting.payload)

    @staticmethod
    def _resolve(meeting: _Meeting, value: bytes | None) -> None:
        for future in meeting.waiting.values():
            if not future.done():
                future.set_result(value)
