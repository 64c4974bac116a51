"""The groups that a training of `bench.steps` has formed, read from the marks its processes leave. Driver side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: Bytes at the end of a file that hold its last line for certain.
_TAIL = 128


@dataclass(frozen=True)
class Group:
    """Processes that form one process group, each with a step or more behind it.

    Attributes:
        number: Later groups have higher ones.
        pids: By rank.
        first_step, last_step: When the slowest of its ranks had done its first step, and when the last step of all was done
            so far; seconds since the epoch.
        steps: Steps that all of its ranks have done.
    """

    number: int
    pids: tuple[int, ...]
    first_step: float
    last_step: float
    steps: int

    @property
    def size(self) -> int:
        return len(self.pids)


def newest_group(folder: Path) -> Group | None:
    """The newest group all of whose ranks have done a step; None without one."""
    files: dict[tuple[int, int], dict[int, tuple[int, Path]]] = {}
    for path in folder.glob("*.steps"):
        number, size, rank, pid = map(int, path.stem.split("-"))
        files.setdefault((number, size), {})[rank] = (pid, path)
    for (number, size), members in sorted(files.items(), reverse=True):
        marks = [read_marks(path) for _, path in members.values()]
        if len(members) == size and all(count for _, _, count in marks):
            pids = tuple(members[rank][0] for rank in range(size))
            first = max(first for first, _, _ in marks)
            last = max(last for _, last, _ in marks)
            return Group(number, pids, first, last, min(count for _, _, count in marks))
    return None


def read_marks(path: Path) -> tuple[float, float, int]:
    """The first and the last time in a file, and about how many there are; a line that is being written is none."""
    with path.open("rb") as file:
        first = file.readline()
        if not first.endswith(b"\n"):
            return 0.0, 0.0, 0
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL))
        whole = [line for line in file.read().rpartition(b"\n")[0].split(b"\n") if len(line) >= len(first) // 2]
    return float(first), float(whole[-1]), max(1, round(size / len(first)))
