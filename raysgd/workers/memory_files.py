"""What the kernel's files say of memory: of a process, of its cgroup, of the node. Linux; elsewhere nothing is known.

Both versions of cgroups are read, and of version 1 also the layout in which containers see no more than their own part.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raysgd.workers.out_of_memory import Room


@dataclass(frozen=True)
class _Names:
    """The files of a memory cgroup, and the keys in them."""

    kills: str
    limit: str
    used: str
    given_back: str


_NAMES = {
    1: _Names("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names("memory.events", "memory.max", "memory.current", "inactive_file"),
}


class MemoryCgroup:
    """A cgroup and those above it, as far as they can be seen from here.

    Args:
        directory: Of the cgroup.
        top: Of the uppermost one.
        version: 1 or 2.
        most_bytes: Memory of the node; limits from there on limit nothing.
    """

    def __init__(self, directory: Path, top: Path, version: int, most_bytes: float) -> None:
        self._names = _NAMES[version]
        self._chain = [directory, *(above for above in directory.parents if above.is_relative_to(top))]
        limits = {place: self._limit(place) for place in self._chain}
        self._limited = {place: limit for place, limit in limits.items() if limit is not None and limit < most_bytes}

    def kills(self) -> int | None:
        """How many of its processes the kernel has killed for memory; None where it does not count them."""
        for place in self._chain:  # in version 2 the lower ones need no files of their own
            with contextlib.suppress(OSError):
                return _fields(place / self._names.kills).get("oom_kill")
        return None

    def rooms(self) -> list[Room]:
        """What it and each one above it may use, of those that are limited."""
        return list(self._rooms())

    def _rooms(self) -> Iterator[Room]:
        for place, limit in self._limited.items():
            with contextlib.suppress(OSError, ValueError):
                used = int((place / self._names.used).read_text())
                given_back = _fields(place / "memory.stat").get(self._names.given_back, 0)
                yield Room("its cgroup", limit, max(0, used - given_back))

    def _limit(self, place: Path) -> int | None:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            return int((place / self._names.limit).read_text())
        return None


class MemoryFiles:
    """The files of this node.

    Args:
        root: Below which they lie.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._mounts: dict[int, tuple[PurePosixPath, Path]] | None = None

    def size(self, pid: int) -> int:
        """The resident size of a process in bytes; 0 for one that is gone, or about to be."""
        try:
            return int(_read(f"{self._root}/proc/{pid}/statm").split()[1]) * mmap.PAGESIZE
        except (OSError, IndexError, ValueError):
            return 0

    def membership(self, pid: int) -> str:
        """The cgroups of a process, as the kernel lists them; can be read only while it lives."""
        try:
            return _read(f"{self._root}/proc/{pid}/cgroup").decode()
        except (OSError, ValueError):
            return ""

    def cgroup(self, membership: str) -> MemoryCgroup | None:
        """The memory cgroup among ``membership``; None where it cannot be seen from here."""
        paths: dict[int, PurePosixPath] = {}
        for line in membership.splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if not controllers:
                paths[2] = PurePosixPath(path)
            elif "memory" in controllers.split(","):
                paths[1] = PurePosixPath(path)
        node = self.room()
        most_bytes = float("inf") if node is None else node.limit_bytes
        for version in (1, 2):  # on a system that has both, version 1 keeps the memory
            if version in paths and version in self._mounted():
                seen_from, top = self._mounted()[version]
                own = paths[version]
                if own.is_relative_to(seen_from) and ".." not in own.parts:
                    directory = top / own.relative_to(seen_from)
                    return MemoryCgroup(directory, top, version, most_bytes)
        return None

    def room(self) -> Room | None:
        """The node's memory."""
        try:
            fields = _fields(self._root / "proc/meminfo")
            total, available = fields["MemTotal:"] << 10, fields["MemAvailable:"] << 10
        except (OSError, KeyError):
            return None
        return Room("the node", total, total - available)

    def kills(self) -> int | None:
        """How many processes the kernel has killed for memory on the whole machine."""
        try:
            return _fields(self._root / "proc/vmstat").get("oom_kill")
        except OSError:
            return None

    def _mounted(self) -> dict[int, tuple[PurePosixPath, Path]]:
        """By version: the cgroup that a hierarchy is mounted from, and where."""
        if self._mounts is None:
            self._mounts = {}
            with contextlib.suppress(OSError):
                for line in (self._root / "proc/self/mountinfo").read_text(errors="replace").splitlines():
                    with contextlib.suppress(ValueError):  # a line of another form than any so far
                        self._note_mount(line)
        return self._mounts

    def _note_mount(self, line: str) -> None:
        mount, _, filesystem = line.partition(" - ")
        _, _, _, seen_from, place, *_ = mount.split(" ")
        kind, _, options = filesystem.split(" ")
        is_memory = kind == "cgroup" and "memory" in options.split(",")
        if (is_memory or kind == "cgroup2") and self._mounts is not None:
            where = (PurePosixPath(seen_from), self._root / place.lstrip("/"))
            self._mounts.setdefault(1 if is_memory else 2, where)


def _read(file: str) -> bytes:
    """The quickest way: these are read for each process at each look."""
    with open(file, "rb", buffering=0) as opened:
        return opened.readall()


def _fields(file: Path) -> dict[str, int]:
    """Lines of a key and a number.

    Raises:
        OSError: It cannot be read.
    """
    pairs = (line.split() for line in file.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
