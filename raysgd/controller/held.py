"""The parts of checkpoints that are in the cluster's memory: references, which keep them there. Runs in the TrainerActor.

A worker says that a part was taken, in its stream of events, and the part itself comes as an item of another stream; the n-th
of the one belongs to the n-th of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from raysgd.checkpoint.manifest import FileEntry, Manifest
from raysgd.checkpoint.store import part_prefix
from raysgd.session.events import PartHeld, Saved, WorkerEvent
from raysgd.workers.orders import HeldCheckpoint

#: Seconds for the parts that were told of to arrive, at the end of a worker's stream.
SETTLE_S = 5.0
#: Seconds for a group to fetch a checkpoint from memory, beside a second for so many bytes.
REACH_S = 3.0
#: The same where it is on no storage: Ray may ask a node that is lost first, and another one 10 s later.
REACH_ALONE_S = 15.0
REACH_BYTES_PER_S = 50e6


class Memory(Protocol):
    """What is needed of the workers; `raysgd.workers.cluster_memory.ClusterMemory`, or a fake."""

    def payloads(self, rank: int, attempt: int) -> AsyncIterator[Any]: ...
    async def reach(self, needed: Callable[[int], Mapping[int, Any]], *, timeout_s: float) -> bool: ...
    async def store(self, rank: int, part: Any, folder: str, prefix: str) -> list[FileEntry]: ...
    def copy(self, parts: Mapping[int, Any]) -> None: ...


class _Rank:
    """One rank of an attempt: parts that came, and those it told of, both still to be matched."""

    def __init__(self) -> None:
        self.came: deque[Any] = deque()
        self.told: deque[PartHeld] = deque()
        self.reader: asyncio.Task[None] | None = None
        self.settled = asyncio.Event()


class HeldParts:
    """Of one run.

    Args:
        memory: The workers' side.
        uri_of: The folder of a checkpoint, by its number.
        feed: Takes what a rank said in an attempt, once the part is here: ``feed(rank, attempt, event)``.
    """

    def __init__(
        self, memory: Memory, uri_of: Callable[[int], str], feed: Callable[[int, int, WorkerEvent], None]
    ) -> None:
        self._memory = memory
        self._uri_of = uri_of
        self._feed = feed
        self._attempt = 0
        self._first_number = 0
        self._ranks: dict[int, _Rank] = {}
        self._parts: dict[int, dict[int, Any]] = {}
        self._num_bytes: dict[int, dict[int, int]] = {}
        self._sharded: set[int] = set()

    def begin(self, attempt: int, first_number: int, start: Manifest | None) -> None:
        """An attempt begins; of what older ones made, the checkpoint that it starts from alone is needed."""
        self._stop_reading()
        self._attempt, self._first_number = attempt, first_number
        kept = {start.number} & self._parts.keys() if start is not None else set()
        self._parts = {number: self._parts[number] for number in kept}
        self._num_bytes = {number: self._num_bytes[number] for number in kept}
        self._sharded &= kept

    def said(self, rank: int, attempt: int, event: WorkerEvent) -> bool:
        """Look at what a rank said; whether it is kept back until its part is here."""
        if attempt != self._attempt or not isinstance(event, (Saved, PartHeld)):
            return False
        here = self._ranks.setdefault(rank, _Rank())
        if isinstance(event, Saved):
            if here.reader is None and not event.is_files and (event.all_ranks or rank == 0):
                here.reader = asyncio.get_running_loop().create_task(self._read(rank, attempt, here))
            return False
        here.settled.clear()
        here.told.append(event)
        self._match(rank, here)
        return True

    async def settle(self, rank: int) -> None:
        """Wait for the parts that a rank, whose stream has ended, told of."""
        here = self._ranks.get(rank)
        if here is not None and here.told:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(here.settled.wait(), SETTLE_S)

    def forget_before(self, number: int) -> None:
        """Let all older checkpoints go, those too of which some parts never came."""
        for older in [each for each in self._parts if each < number]:
            del self._parts[older], self._num_bytes[older]
            self._sharded.discard(older)

    def of(self, manifest: Manifest | None, rank: int) -> HeldCheckpoint | None:
        """A checkpoint as ``rank`` needs it; None for none."""
        if manifest is None:
            return None
        return HeldCheckpoint(manifest, self._needed(manifest, rank))

    async def is_reachable(self, manifest: Manifest, *, is_alone: bool = False) -> bool:
        """Whether the group that is ready can read a checkpoint.

        Args:
            manifest: Of the checkpoint.
            is_alone: It is in memory only: what was done since the one before would be lost with it.
        """
        parts = self._parts.get(manifest.number)
        if not parts:
            return False
        timeout_s = REACH_ALONE_S if is_alone else REACH_S
        num_bytes = self._num_bytes[manifest.number].values()
        timeout_s += (sum if manifest.number in self._sharded else max)(num_bytes) / REACH_BYTES_PER_S
        return await self._memory.reach(lambda rank: self._needed(manifest, rank), timeout_s=timeout_s)

    async def store(self, manifest: Manifest) -> dict[int, list[FileEntry]]:
        """Write a checkpoint to storage; the files by rank.

        Raises:
            Exception: It could not be written.
        """
        folder = self._uri_of(manifest.number)
        written = {}
        for rank, part in self._parts.get(manifest.number, {}).items():
            written[rank] = await self._memory.store(rank, part, folder, part_prefix(manifest.attempt, rank))
        if not written:
            raise LookupError("its parts are gone")
        return written

    def copy(self, number: int) -> None:
        """Have second nodes hold a checkpoint."""
        self._memory.copy(self._parts.get(number, {}))

    def close(self) -> None:
        """The run is over: let everything go."""
        self._stop_reading()
        if self._parts:
            self._parts.clear()
            self._memory.copy({})

    def _needed(self, manifest: Manifest, rank: int) -> Mapping[int, Any]:
        """The parts that a rank loads: its own, where each has one, and where these have pieces of arrays all of them."""
        parts = self._parts[manifest.number]
        if not manifest.all_ranks or manifest.number in self._sharded:
            return parts
        return {held: parts[held] for held in (rank if rank in parts else min(parts),)}

    def _stop_reading(self) -> None:
        for here in self._ranks.values():
            if here.reader is not None:
                here.reader.cancel()
        self._ranks.clear()

    async def _read(self, rank: int, attempt: int, here: _Rank) -> None:
        async for part in self._memory.payloads(rank, attempt):
            here.came.append(part)
            self._match(rank, here)

    def _match(self, rank: int, here: _Rank) -> None:
        while here.came and here.told:
            part, event = here.came.popleft(), here.told.popleft()
            number = self._first_number + event.call
            self._parts.setdefault(number, {})[rank] = part
            self._num_bytes.setdefault(number, {})[rank] = event.num_bytes
            if event.beside is not None:
                self._sharded.add(number)
            self._feed(rank, self._attempt, event)
        if not here.told:
            here.settled.set()
