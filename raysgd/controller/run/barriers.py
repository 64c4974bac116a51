"""Where ranks wait for each other: `barrier`, `broadcast` and `gather`, for every backend. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass, field


@dataclass
class _Barrier:
    payloads: dict[int, bytes] = field(default_factory=dict)
    waiting: dict[int, asyncio.Future[bytes | None]] = field(default_factory=dict)


class Barriers:
    """The barriers of one attempt. A rank that has returned is not waited for."""

    def __init__(self, world_size: int) -> None:
        self._expected = set(range(world_size))
        self._barriers: dict[tuple[str, int], _Barrier] = {}
        self._opened: dict[str, tuple[int, bytes]] = {}  # the last one of each kind, with the answer of all ranks
        self._is_over = False

    async def join(self, rank: int, what: str, index: int, payload: bytes | None) -> bytes | None:
        """Wait for all ranks, and return None if the attempt ended. A rank that has not received its answer may ask again.

        Returns:
            Rank 0's payload, empty if there is none; of a barrier ``"gather"`` a pickle of all payloads by rank.
        """
        if self._is_over:
            return None
        if (opened := self._opened.get(what)) is not None and opened[0] == index:
            return opened[1]
        barrier = self._barriers.setdefault((what, index), _Barrier())
        if payload is not None:
            barrier.payloads[rank] = payload
        barrier.waiting.setdefault(rank, asyncio.get_running_loop().create_future())
        self._open_complete()
        return await asyncio.shield(barrier.waiting[rank])  # a call that is gone does not end the one after it

    def left(self, rank: int) -> None:
        """Stop waiting for ``rank``, which has returned. A rank that leaves in another way ends the attempt."""
        self._expected.discard(rank)
        self._open_complete()

    def end(self) -> None:
        """Release every rank that waits, because the attempt is over."""
        self._is_over = True
        for barrier in self._barriers.values():
            self._resolve(barrier, None)
        self._barriers.clear()

    def _open_complete(self) -> None:
        for key, barrier in list(self._barriers.items()):
            # The first comparison says no to nearly every rank, without looking at all of them.
            if len(self._expected) <= len(barrier.waiting) and self._expected <= barrier.waiting.keys():
                del self._barriers[key]
                payloads = barrier.payloads
                answer = pickle.dumps(payloads) if key[0] == "gather" else payloads.get(0, b"")
                self._opened[key[0]] = key[1], answer
                self._resolve(barrier, answer)

    @staticmethod
    def _resolve(barrier: _Barrier, value: bytes | None) -> None:
        for future in barrier.waiting.values():
            if not future.done():
                future.set_result(value)
