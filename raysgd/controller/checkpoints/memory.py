"""The parts of checkpoints in the cluster's memory: references, which keep the parts there. Runs in the TrainerActor.

A worker reports in its event stream that it put a part into memory, and the part itself is an item of another stream. The
n-th such event belongs to the n-th item.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.store import part_prefix
from raysgd.session.events import PartHeld, Saved, WorkerEvent
from raysgd.workers.orders import HeldCheckpoint

if TYPE_CHECKING:
    from raysgd.workers.group.checkpoint_memory import ClusterMemory

#: Seconds for announced parts to arrive after the end of a worker's event stream.
SETTLE_S = 5.0
#: Seconds for a group to fetch a checkpoint from memory, in addition to one second for each `REACH_BYTES_PER_S` bytes.
REACH_S = 3.0
#: The same for a checkpoint that is not on storage: Ray may ask a lost node first, and another one 10 s later.
REACH_UNSTORED_S = 15.0
REACH_BYTES_PER_S = 50e6


class _RankParts:
    """The parts and the announcements of one rank that are not matched yet."""

    def __init__(self) -> None:
        self.arrived: deque[Any] = deque()
        self.announced: deque[PartHeld] = deque()
        self.reader: asyncio.Task[None] | None = None
        self.settled = asyncio.Event()


class MemoryCheckpoints:
    """The checkpoints of a run in the cluster's memory.

    Args:
        memory: The workers' side.
        uri_of: Returns the folder of a checkpoint, by its number.
        feed: Called as ``feed(rank, attempt, event)`` with each announcement whose part has arrived.
    """

    def __init__(
        self, memory: ClusterMemory, uri_of: Callable[[int], str], feed: Callable[[int, int, WorkerEvent], None]
    ) -> None:
        self._memory = memory
        self._uri_of = uri_of
        self._feed = feed
        self._attempt = 0
        self._first_number = 0
        self._ranks: dict[int, _RankParts] = {}
        self._parts: dict[int, dict[int, Any]] = {}
        self._num_bytes: dict[int, dict[int, int]] = {}
        self._sharded: set[int] = set()

    def begin_attempt(self, attempt: int, first_number: int, start: Manifest | None) -> None:
        """Begin to collect parts; of earlier attempts only the checkpoint that this one starts from is kept."""
        self._stop_reading()
        self._attempt, self._first_number = attempt, first_number
        kept = {start.number} & self._parts.keys() if start is not None else set()
        self._parts = {number: self._parts[number] for number in kept}
        self._num_bytes = {number: self._num_bytes[number] for number in kept}
        self._sharded &= kept

    def intercept(self, rank: int, attempt: int, event: WorkerEvent) -> bool:
        """Look at an event of a rank; returns whether it is kept back until its part has arrived."""
        if attempt != self._attempt or not isinstance(event, (Saved, PartHeld)):
            return False
        parts = self._ranks.setdefault(rank, _RankParts())
        if isinstance(event, Saved):
            if parts.reader is None and not event.is_files and (event.all_ranks or rank == 0):
                parts.reader = asyncio.get_running_loop().create_task(self._read(rank, attempt, parts))
            return False
        parts.settled.clear()
        parts.announced.append(event)
        self._match(rank, parts)
        return True

    async def settle(self, rank: int) -> None:
        """Wait for the announced parts of a rank whose event stream has ended."""
        parts = self._ranks.get(rank)
        if parts is not None and parts.announced:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(parts.settled.wait(), SETTLE_S)

    def keep(self, number: int) -> None:
        """Copy a checkpoint to a second node and release all older ones, also those with missing parts."""
        for older in [each for each in self._parts if each < number]:
            del self._parts[older], self._num_bytes[older]
            self._sharded.discard(older)
        self._memory.copy(self._parts.get(number, {}))

    def for_rank(self, manifest: Manifest | None, rank: int) -> HeldCheckpoint | None:
        """Return a checkpoint with the parts that ``rank`` loads; None for None."""
        return None if manifest is None else HeldCheckpoint(manifest, self._parts_for(manifest, rank))

    async def is_reachable(self, manifest: Manifest, *, is_unstored: bool = False) -> bool:
        """Return whether all workers of the group can read a checkpoint.

        Args:
            manifest: The manifest of the checkpoint.
            is_unstored: The checkpoint is in memory alone, so it is worth waiting for.
        """
        parts = self._parts.get(manifest.number)
        if not parts:
            return False
        timeout_s = REACH_UNSTORED_S if is_unstored else REACH_S
        num_bytes = self._num_bytes[manifest.number].values()
        timeout_s += (sum if manifest.number in self._sharded else max)(num_bytes) / REACH_BYTES_PER_S
        return await self._memory.reach(lambda rank: self._parts_for(manifest, rank), timeout_s=timeout_s)

    async def store(self, manifest: Manifest) -> dict[int, list[FileEntry]]:
        """Write a checkpoint to storage; returns its files by rank.

        Raises:
            Exception: The checkpoint could not be written.
        """
        folder = self._uri_of(manifest.number)
        written = {}
        for rank, part in self._parts.get(manifest.number, {}).items():
            written[rank] = await self._memory.store(rank, part, folder, part_prefix(manifest.attempt, rank))
        if not written:
            raise LookupError("its parts are gone")
        return written

    def close(self) -> None:
        """Release all parts, because the run is over."""
        self._stop_reading()
        if self._parts:
            self._parts.clear()
            self._memory.copy({})

    def _parts_for(self, manifest: Manifest, rank: int) -> Mapping[int, Any]:
        """Return the parts that a rank loads: its own if each rank has one, and all parts if they have array shards."""
        parts = self._parts[manifest.number]
        if not manifest.all_ranks or manifest.number in self._sharded:
            return parts
        return {held: parts[held] for held in (rank if rank in parts else min(parts),)}

    def _stop_reading(self) -> None:
        for parts in self._ranks.values():
            if parts.reader is not None:
                parts.reader.cancel()
        self._ranks.clear()

    async def _read(self, rank: int, attempt: int, parts: _RankParts) -> None:
        async for part in self._memory.payloads(rank, attempt):
            parts.arrived.append(part)
            self._match(rank, parts)

    def _match(self, rank: int, parts: _RankParts) -> None:
        while parts.arrived and parts.announced:
            part, event = parts.arrived.popleft(), parts.announced.popleft()
            number = self._first_number + event.call
            self._parts.setdefault(number, {})[rank] = part
            self._num_bytes.setdefault(number, {})[rank] = event.num_bytes
            if event.unsharded_digest is not None:
                self._sharded.add(number)
            self._feed(rank, self._attempt, event)
        if not parts.announced:
            parts.settled.set()
