"""Looks at the memory of worker processes again and again, so that something is known of one that is gone.

Runs in a node's agent, which looks every half second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from raysgd.workers.memory_files import MemoryCgroup, MemoryFiles
from raysgd.workers.out_of_memory import MemoryEvidence, Room, Size

#: Looks that are kept.
_KEPT = 60
#: A process may still be seen this long after the kernel has counted it as killed: large ones take their time to go.
_DYING_S = 2.0

_Where = Literal["in its cgroup", "on the node"]


@dataclass(frozen=True)
class _Count:
    """What the kernel's count of memory kills was."""

    at_s: float
    where: _Where
    kills: int


@dataclass
class _Track:
    """One process, and what was seen of it while it lived.

    Attributes:
        seen_in: The cgroups it was in at the last look, as the kernel lists them.
        counted_in: The same, of the cgroup that is looked at.
    """

    pid: int
    first: Size
    seen_in: str
    counted_in: str
    sizes: deque[Size] = field(default_factory=lambda: deque(maxlen=_KEPT))
    counts: deque[_Count] = field(default_factory=lambda: deque(maxlen=_KEPT))
    room: Room | None = None
    is_gone: bool = False


class MemoryWatch:
    """What was seen of each process. Its methods may be called from any thread.

    Args:
        files: Of this node.
        clock: In seconds; only differences count.
    """

    def __init__(self, files: MemoryFiles | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = MemoryFiles() if files is None else files
        self._clock = clock
        self._tracks: dict[int, _Track] = {}
        self._cgroups: dict[str, MemoryCgroup | None] = {}
        self._lock = threading.Lock()

    def watch(self, pids: Iterable[int]) -> None:
        """Look at these processes, now and from now on, and forget all others."""
        with self._lock:
            self._cgroups.clear()  # their limits may be others by now
            known = {pid: track for pid, track in self._tracks.items() if not track.is_gone}
            found = {pid: known.get(pid) or self._begin(pid) for pid in pids}
            self._tracks = {pid: track for pid, track in found.items() if track is not None}
        self.look()

    def look(self) -> None:
        """One look at each that lives."""
        with self._lock:
            alive = [track for track in self._tracks.values() if self._see(track)]
            node = self._files.room() if alive else None
            for membership in {track.counted_in for track in alive}:
                count, room = self._count(membership), self._fullest(membership, node)
                for track in alive:
                    if track.counted_in == membership:
                        track.room = room
                        track.counts += [] if count is None else [count]

    def evidence(self, pid: int) -> MemoryEvidence | None:
        """What is known of a process that has just died; None for one that nobody looked at."""
        with self._lock:
            track = self._tracks.get(pid)
            if track is None:
                return None
            sizes = tuple(size for size in track.sizes if size != track.first)
            known = MemoryEvidence((track.first, *sizes), track.room)
            before, now = _before(track.counts), self._count(track.counted_in)
            if before is None or now is None or before.where != now.where:
                return known
            return replace(known, kills=max(0, now.kills - before.kills), counted=now.where)

    def _begin(self, pid: int) -> _Track | None:
        size, membership = Size(self._clock(), self._files.size(pid)), self._files.membership(pid)
        return _Track(pid, size, membership, membership) if size.size_bytes else None

    def _see(self, track: _Track) -> bool:
        """Take its size, and where it is; whether it still lives."""
        size_bytes = 0 if track.is_gone else self._files.size(track.pid)
        if not size_bytes:
            track.is_gone = True
            return False
        track.sizes.append(Size(self._clock(), size_bytes))
        membership = self._files.membership(track.pid)
        # It was moved if it is seen elsewhere twice; the kernel lists one that is exiting in the root cgroup.
        if membership == track.seen_in != track.counted_in:
            track.counted_in = membership
            track.counts.clear()
        track.seen_in = membership
        return True

    def _count(self, membership: str) -> _Count | None:
        cgroup = self._cgroup(membership)
        kills = None if cgroup is None else cgroup.kills()
        where: _Where = "on the node" if kills is None else "in its cgroup"
        if kills is None:
            kills = self._files.kills()
        return None if kills is None else _Count(self._clock(), where, kills)

    def _fullest(self, membership: str, node: Room | None) -> Room | None:
        cgroup = self._cgroup(membership)
        rooms = [*([] if cgroup is None else cgroup.rooms()), *([] if node is None else [node])]
        return max(rooms, key=lambda room: room.share, default=None)

    def _cgroup(self, membership: str) -> MemoryCgroup | None:
        if membership not in self._cgroups:
            self._cgroups[membership] = self._files.cgroup(membership)
        return self._cgroups[membership]


def _before(counts: Sequence[_Count]) -> _Count | None:
    """The count from which the process's own death would be counted."""
    if not counts:
        return None
    enough = [count for count in counts if counts[-1].at_s - count.at_s >= _DYING_S]
    return enough[-1] if enough else counts[0]
