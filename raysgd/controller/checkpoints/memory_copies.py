"""The parts of checkpoints in the cluster's memory: references, which keep the parts there. Runs in the TrainerActor.

A worker reports in its event stream that it put a part into memory, and the part itself is an item of another stream. The
n-th such event belongs to the n-th item.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.store import part_prefix
from raysgd.session.events import PartHeld, Saved, WorkerEvent, is_copy
from raysgd.session.rank_state import RankState, shared_states
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


@dataclass
class _Parts:
    """The parts of one checkpoint, by the rank that saved them."""

    refs: dict[int, Any] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    has_shards: bool = False


class _Arrivals:
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
        self._arrivals: dict[int, _Arrivals] = {}  # by rank
        self._checkpoints: dict[int, _Parts] = {}  # by number
        self._kept: set[int] = set()  # the complete ones
        self._shared: tuple[int, dict[int, RankState]] | None = None  # of which checkpoint, and `shared_states` of it

    def begin_attempt(self, attempt: int, first_number: int, kept: Collection[int]) -> None:
        """Begin to collect parts. Of earlier attempts, only the checkpoints with these numbers are kept."""
        self._stop_reading()
        self._attempt, self._first_number = attempt, first_number
        self._shared = None
        self._checkpoints = {number: parts for number, parts in self._checkpoints.items() if number in kept}

    def intercept(self, rank: int, attempt: int, event: WorkerEvent) -> bool:
        """Take an event of a rank; returns whether it is kept back until its part has arrived."""
        if attempt != self._attempt or not isinstance(event, (Saved, PartHeld)):
            return False
        arrivals = self._arrivals.setdefault(rank, _Arrivals())
        if isinstance(event, Saved):
            if arrivals.reader is None and not event.is_files and (event.all_ranks or rank == 0):
                arrivals.reader = asyncio.get_running_loop().create_task(self._read(rank, attempt, arrivals))
            return False
        arrivals.settled.clear()
        arrivals.announced.append(event)
        self._match(rank, arrivals)
        return True

    async def settle(self, rank: int) -> None:
        """Wait for the announced parts of a rank whose event stream has ended."""
        arrivals = self._arrivals.get(rank)
        if arrivals is not None and arrivals.announced:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(arrivals.settled.wait(), SETTLE_S)

    def keep(self, number: int) -> None:
        """Copy a checkpoint to a second node and release all older ones, also those with missing parts.

        Checkpoints, and copies of live states, each replace their own kind.
        """
        for older in [each for each in self._checkpoints if each < number and is_copy(each) == is_copy(number)]:
            del self._checkpoints[older]
        self._kept = {each for each in self._kept if is_copy(each) != is_copy(number)} | {number}
        self._memory.copy([self._refs(each) for each in self._kept])

    def for_rank(self, manifest: Manifest | None, rank: int) -> HeldCheckpoint | None:
        """Return a checkpoint with the parts and the rank states that ``rank`` loads; None for None.

        The states of all ranks in the order for each rank would be gigabytes for a thousand of them.
        """
        if manifest is None:
            return None
        if self._shared is None or self._shared[0] != manifest.number:
            self._shared = manifest.number, shared_states(manifest.rank_states)
        states = dict(self._shared[1])
        if rank in manifest.rank_states:
            states[rank] = {**manifest.rank_states[rank], **states.get(rank, {})}
        return HeldCheckpoint(replace(manifest, rank_states=states), self._parts_for(manifest, rank))

    async def is_reachable(self, manifest: Manifest, *, is_unstored: bool = False) -> bool:
        """Return whether all workers of the group can read a checkpoint.

        Args:
            manifest: The manifest of the checkpoint.
            is_unstored: The checkpoint is in memory alone, so it is worth waiting for.
        """
        parts = self._checkpoints.get(manifest.number)
        if parts is None:
            return False
        timeout_s = REACH_UNSTORED_S if is_unstored else REACH_S
        timeout_s += (sum if parts.has_shards else max)(parts.num_bytes.values()) / REACH_BYTES_PER_S
        return await self._memory.reach(lambda rank: self._parts_for(manifest, rank), timeout_s=timeout_s)

    async def store(self, manifest: Manifest) -> dict[int, list[FileEntry]]:
        """Write a checkpoint to storage; returns its files by rank.

        Raises:
            Exception: The checkpoint could not be written.
        """
        folder = self._uri_of(manifest.number)
        written = {}
        for rank, part in self._refs(manifest.number).items():
            written[rank] = await self._memory.store(rank, part, folder, part_prefix(manifest.attempt, rank))
        if not written:
            raise LookupError("its parts are gone")
        return written

    def close(self) -> None:
        """Release all parts, because the run is over."""
        self._stop_reading()
        if self._checkpoints:
            self._checkpoints.clear()
            self._memory.copy([])

    def _refs(self, number: int) -> Mapping[int, Any]:
        parts = self._checkpoints.get(number)
        return {} if parts is None else parts.refs

    def _parts_for(self, manifest: Manifest, rank: int) -> Mapping[int, Any]:
        """Return the parts that a rank loads: its own if each rank has one, and all parts if they have array shards."""
        parts = self._checkpoints[manifest.number]
        if not manifest.all_ranks or parts.has_shards:
            return parts.refs
        held = rank if rank in parts.refs else min(parts.refs)
        return {held: parts.refs[held]}

    def _stop_reading(self) -> None:
        for arrivals in self._arrivals.values():
            if arrivals.reader is not None:
                arrivals.reader.cancel()
        self._arrivals.clear()

    async def _read(self, rank: int, attempt: int, arrivals: _Arrivals) -> None:
        async for ref in self._memory.payloads(rank, attempt):
            arrivals.arrived.append(ref)
            self._match(rank, arrivals)

    def _match(self, rank: int, arrivals: _Arrivals) -> None:
        while arrivals.arrived and arrivals.announced:
            ref, event = arrivals.arrived.popleft(), arrivals.announced.popleft()
            number = event.call if is_copy(event.call) else self._first_number + event.call
            parts = self._checkpoints.setdefault(number, _Parts())
            parts.refs[rank] = ref
            parts.num_bytes[rank] = event.num_bytes
            parts.has_shards |= event.unsharded_digest is not None
            self._feed(rank, self._attempt, event)
        if not arrivals.announced:
            arrivals.settled.set()
