"""Records the memory use of worker processes, and judges whether a process that has died ran out of memory. Needs no Ray.

`MemoryWatch` samples processes on their own node, so that something is known of a process that is gone. It reads the
kernel's files, because psutil knows neither cgroups nor the kernel's counts of memory kills; without Linux nothing is known.
Both versions of cgroups are read, also in a container of version 1, which sees only its own part of the tree.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal

from raysgd._util.text import in_bytes, in_time

#: Memory is short if at least this fraction of it is in use.
_FULL_FRACTION = 0.85
#: A process is growing if it has grown by this fraction of its size, and by this number of bytes, within this time.
_GROWTH_FRACTION = 0.05
_GROWTH_BYTES = 64 << 20
_RECENT_S = 30.0
#: The number of samples that are kept.
NUM_SAMPLES = 60
#: A process may still be visible this long after the kernel has counted its kill: large processes need time to exit.
_DYING_S = 2.0

_CountedIn = Literal["in its cgroup", "on the node"]

ADVICE = "Smaller batches, fewer workers a node or more memory per node help."


@dataclass(frozen=True)
class Size:
    """The resident size of a process; ``at_s`` is a time on a monotonic clock of the node."""

    at_s: float
    size_bytes: int


@dataclass(frozen=True)
class MemoryPool:
    """Memory that a process shares with others.

    Attributes:
        owner: ``the node`` or ``its cgroup``.
        limit_bytes: The size of the pool.
        used_bytes: The memory in use, without what the kernel can reclaim, such as cached files.
    """

    owner: str
    limit_bytes: int
    used_bytes: int

    @property
    def used_fraction(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True)
class MemoryEvidence:
    """What a node's agent knows of the memory of a process that is gone.

    Attributes:
        sizes: The first sample of its size and the last ones, in the order of time; at least one.
        pool: The fullest of the pools that it was in, at the last sample.
        kills: The number of processes that the kernel has killed for memory since shortly before the last sample.
        counted: Where the kernel counts ``kills``: in the process's own cgroup, or on the whole machine with all containers.
    """

    sizes: tuple[Size, ...]
    pool: MemoryPool | None = None
    kills: int = 0
    counted: _CountedIn = "on the node"


def judge(evidence: MemoryEvidence) -> str | None:
    """Say that a process which died for an unknown reason ran out of memory; None if that is unlikely."""
    is_full = evidence.pool is not None and evidence.pool.used_fraction >= _FULL_FRACTION
    is_growing = _is_growing(evidence.sizes)
    facts = [describe_growth(evidence.sizes), *_describe_pool(evidence.pool, is_full)]
    if evidence.kills > 0 and (evidence.counted == "in its cgroup" or is_full or is_growing):
        counted = f"the kernel's count of memory kills {evidence.counted} went up"
        return f"out of memory: {'; '.join([*facts, counted])}. {ADVICE}"
    if is_full and is_growing:
        return f"probably out of memory: it was killed, or crashed; {'; '.join(facts)}. {ADVICE}"
    return None


def describe_growth(sizes: Sequence[Size]) -> str:
    """Say how large a process was at the end, and how fast it grew to that size."""
    last = sizes[-1]
    low = min(size.size_bytes for size in sizes)
    growth = last.size_bytes - low
    if not _is_growth(growth, last.size_bytes):
        return f"its resident size was {in_bytes(last.size_bytes)}"
    start = [size for size in sizes if size.size_bytes <= low + growth // 10][-1]
    duration = in_time(last.at_s - start.at_s)
    return f"its resident size grew from {in_bytes(start.size_bytes)} to {in_bytes(last.size_bytes)} in {duration}"


def _is_growing(sizes: Sequence[Size]) -> bool:
    last = sizes[-1]
    low = min(size.size_bytes for size in sizes if last.at_s - size.at_s <= _RECENT_S)
    return _is_growth(last.size_bytes - low, last.size_bytes)


def _is_growth(growth: int, size_bytes: int) -> bool:
    return growth >= max(_GROWTH_BYTES, _GROWTH_FRACTION * size_bytes)


def _describe_pool(pool: MemoryPool | None, is_full: bool) -> list[str]:
    if pool is None:
        return []
    used = f", {in_bytes(pool.used_bytes)} of it in use" if is_full else ""
    return [f"{pool.owner} has {in_bytes(pool.limit_bytes)}{used}"]


# -- the kernel's files --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """The files of a memory cgroup, and the keys in them."""

    kills: str
    limit: str
    used: str
    reclaimable: str


_NAMES = {
    1: _Names("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names("memory.events", "memory.max", "memory.current", "inactive_file"),
}


class MemoryCgroup:
    """A cgroup and its visible ancestors, up to the directory ``top``; limits above ``node_bytes`` have no effect."""

    def __init__(self, directory: Path, top: Path, version: int, node_bytes: float) -> None:
        self._names = _NAMES[version]
        self._chain = [directory, *(above for above in directory.parents if above.is_relative_to(top))]
        limits = {folder: self._limit(folder) for folder in self._chain}
        self._limited = {folder: limit for folder, limit in limits.items() if limit is not None and limit < node_bytes}

    def kills(self) -> int | None:
        """Return how many of its processes the kernel has killed for memory; None if the kernel does not count them."""
        for folder in self._chain:  # in version 2 a cgroup may leave these files to its ancestors
            with contextlib.suppress(OSError):
                return _read_fields(folder / self._names.kills).get("oom_kill")
        return None

    def pools(self) -> Iterator[MemoryPool]:
        """Yield the memory of this cgroup and of each ancestor, for those with a limit."""
        for folder, limit in self._limited.items():
            with contextlib.suppress(OSError, ValueError):
                used = int((folder / self._names.used).read_text())
                reclaimable = _read_fields(folder / "memory.stat").get(self._names.reclaimable, 0)
                yield MemoryPool("its cgroup", limit, max(0, used - reclaimable))

    def _limit(self, folder: Path) -> int | None:
        with contextlib.suppress(OSError, ValueError):  # there is no file, or it says "max"
            return int((folder / self._names.limit).read_text())
        return None


class MemoryFiles:
    """The files of this node.

    Args:
        root: The root of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def size(self, pid: int) -> int:
        """Return the resident size of a process in bytes; 0 for one that is gone or exiting."""
        try:
            return int(_read(f"{self._root}/proc/{pid}/statm").split()[1]) * mmap.PAGESIZE
        except (OSError, IndexError, ValueError):
            return 0

    def membership(self, pid: int) -> str:
        """Return the kernel's list of a process's cgroups, which can be read only while it lives."""
        try:
            return _read(f"{self._root}/proc/{pid}/cgroup").decode()
        except (OSError, ValueError):
            return ""

    def cgroup(self, membership: str) -> MemoryCgroup | None:
        """Return the memory cgroup in a list of cgroups; None if it is not visible from here."""
        paths: dict[int, PurePosixPath] = {}
        for line in membership.splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if not controllers:
                paths[2] = PurePosixPath(path)
            elif "memory" in controllers.split(","):
                paths[1] = PurePosixPath(path)
        node = self.pool()
        node_bytes = float("inf") if node is None else node.limit_bytes
        for version in (1, 2):  # on a system that has both, version 1 controls the memory
            if version in paths and version in self._mounts:
                mounted, top = self._mounts[version]
                own = paths[version]
                if own.is_relative_to(mounted) and ".." not in own.parts:
                    directory = top / own.relative_to(mounted)
                    return MemoryCgroup(directory, top, version, node_bytes)
        return None

    def pool(self) -> MemoryPool | None:
        """Return the node's memory, if known."""
        try:
            fields = _read_fields(self._root / "proc/meminfo")
            total, available = fields["MemTotal:"] << 10, fields["MemAvailable:"] << 10
        except (OSError, KeyError):
            return None
        return MemoryPool("the node", total, total - available)

    def pools_of(self, pid: int) -> list[MemoryPool]:
        """Return the memory that a process shares with others, the node's first; empty if it cannot be read."""
        node, group = self.pool(), self.cgroup(self.membership(pid))
        return [*([] if node is None else [node]), *([] if group is None else group.pools())]

    def kills(self) -> int | None:
        """Return how many processes the kernel has killed for memory on the whole machine."""
        try:
            return _read_fields(self._root / "proc/vmstat").get("oom_kill")
        except OSError:
            return None

    @cached_property
    def _mounts(self) -> dict[int, tuple[PurePosixPath, Path]]:
        """By version, the cgroup that is the root of the mounted hierarchy, and the mount point."""
        mounts: dict[int, tuple[PurePosixPath, Path]] = {}
        with contextlib.suppress(OSError):
            for line in (self._root / "proc/self/mountinfo").read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # a line of an unknown form
                    mount, _, filesystem = line.partition(" - ")
                    _, _, _, mounted, mount_point, *_ = mount.split(" ")
                    kind, _, options = filesystem.split(" ")
                    is_memory = kind == "cgroup" and "memory" in options.split(",")
                    if is_memory or kind == "cgroup2":
                        top = self._root / mount_point.lstrip("/")
                        mounts.setdefault(1 if is_memory else 2, (PurePosixPath(mounted), top))
        return mounts


def _read(file: str) -> bytes:
    # Unbuffered, which is fastest: two such files are read for each process at each sample.
    with open(file, "rb", buffering=0) as opened:
        return opened.readall()


def _read_fields(file: Path) -> dict[str, int]:
    """Parse a file with a key and a number on each line; raise an OSError if it cannot be read."""
    pairs = (line.split() for line in file.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


# -- sampling ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KillCount:
    """The kernel's count of memory kills at one moment."""

    at_s: float
    counted: _CountedIn
    kills: int


@dataclass
class _Track:
    """One process, with its samples.

    Attributes:
        seen_in: The kernel's list of its cgroups at the last sample.
        counted_in: The list with the cgroup in which kills are counted.
    """

    pid: int
    first: Size
    seen_in: str
    counted_in: str
    sizes: deque[Size] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    counts: deque[_KillCount] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    pool: MemoryPool | None = None
    is_gone: bool = False


class MemoryWatch:
    """Samples the memory of processes. Thread-safe.

    Args:
        files: The kernel's files of this node.
        clock: Returns seconds since any fixed moment.
    """

    def __init__(self, files: MemoryFiles | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = MemoryFiles() if files is None else files
        self._clock = clock
        self._tracks: dict[int, _Track] = {}
        self._cgroups: dict[str, MemoryCgroup | None] = {}
        self._lock = threading.Lock()

    def watch(self, pids: Iterable[int]) -> None:
        """Sample these processes from now on, and forget all others."""
        with self._lock:
            self._cgroups.clear()  # their limits may have changed
            known = {pid: track for pid, track in self._tracks.items() if not track.is_gone}
            found = {pid: known.get(pid) or self._begin(pid) for pid in pids}
            self._tracks = {pid: track for pid, track in found.items() if track is not None}
        self.sample()

    def sample(self) -> None:
        """Take one sample of each living process."""
        with self._lock:
            alive = [track for track in self._tracks.values() if self._update(track)]
            node = self._files.pool() if alive else None
            for membership in {track.counted_in for track in alive}:
                count, pool = self._count_kills(membership), self._fullest_pool(membership, node)
                for track in alive:
                    if track.counted_in == membership:
                        track.pool = pool
                        track.counts += [] if count is None else [count]

    def evidence(self, pid: int) -> MemoryEvidence | None:
        """Return what is known of a process that has just died; None if it was not watched."""
        with self._lock:
            track = self._tracks.get(pid)
            if track is None:
                return None
            sizes = tuple(size for size in track.sizes if size != track.first)
            evidence = MemoryEvidence((track.first, *sizes), track.pool)
            before, now = _count_before_death(track.counts), self._count_kills(track.counted_in)
            if before is None or now is None or before.counted != now.counted:
                return evidence
            return replace(evidence, kills=max(0, now.kills - before.kills), counted=now.counted)

    def _begin(self, pid: int) -> _Track | None:
        size, membership = Size(self._clock(), self._files.size(pid)), self._files.membership(pid)
        return _Track(pid, size, membership, membership) if size.size_bytes else None

    def _update(self, track: _Track) -> bool:
        """Sample one process; return True if it still lives."""
        size_bytes = 0 if track.is_gone else self._files.size(track.pid)
        if not size_bytes:
            track.is_gone = True
            return False
        track.sizes.append(Size(self._clock(), size_bytes))
        membership = self._files.membership(track.pid)
        # Only two samples in another cgroup show a move: the kernel lists an exiting process in the root cgroup.
        if membership == track.seen_in != track.counted_in:
            track.counted_in = membership
            track.counts.clear()
        track.seen_in = membership
        return True

    def _count_kills(self, membership: str) -> _KillCount | None:
        cgroup = self._cgroup(membership)
        kills = None if cgroup is None else cgroup.kills()
        counted: _CountedIn = "on the node" if kills is None else "in its cgroup"
        if kills is None:
            kills = self._files.kills()
        return None if kills is None else _KillCount(self._clock(), counted, kills)

    def _fullest_pool(self, membership: str, node: MemoryPool | None) -> MemoryPool | None:
        cgroup = self._cgroup(membership)
        pools = [*([] if cgroup is None else cgroup.pools()), *([] if node is None else [node])]
        return max(pools, key=lambda pool: pool.used_fraction, default=None)

    def _cgroup(self, membership: str) -> MemoryCgroup | None:
        if membership not in self._cgroups:
            self._cgroups[membership] = self._files.cgroup(membership)
        return self._cgroups[membership]


def _count_before_death(counts: Sequence[_KillCount]) -> _KillCount | None:
    """Return the newest count that cannot include the kill of the process itself."""
    if not counts:
        return None
    early = [count for count in counts if counts[-1].at_s - count.at_s >= _DYING_S]
    return early[-1] if early else counts[0]
