"""Was it memory that a killed worker died of? Pure: what its node had seen of it, in; a sentence, or None, out.

The kernel, Ray's monitor and services such as ``earlyoom`` all end a process with SIGKILL, as does anybody else, so the signal
says nothing. A count that the kernel keeps of its memory kills says it for certain; sizes alone make it probable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raysgd._util.wording import in_bytes, in_time

#: From this share of what there is, memory is short.
_FULL = 0.85
#: A process is growing that has grown by this share of its size, and at least by so much, within so many seconds.
_GROWN = 0.05
_GROWN_BYTES = 64 << 20
_RECENT_S = 30.0

ADVICE = "Smaller batches, fewer workers a node or more memory per node help."


@dataclass(frozen=True)
class Size:
    """A process's resident size. ``at_s`` is of a clock of its node that only differences are taken of."""

    at_s: float
    size_bytes: int


@dataclass(frozen=True)
class Room:
    """Memory that a process shares with others.

    Attributes:
        of: Whose it is: ``the node`` or ``its cgroup``.
        limit_bytes: All of it.
        used_bytes: What was in use, without what the kernel would give back, such as cached files.
    """

    of: str
    limit_bytes: int
    used_bytes: int

    @property
    def share(self) -> float:
        """What was in use, from 0 to 1."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True)
class MemoryEvidence:
    """What a node's agent knows of a process that is gone.

    Attributes:
        sizes: In the order of time, at least one: the first look at it, and the last ones.
        room: At the last look; of the rooms it was in, the fullest.
        kills: How many processes the kernel has killed for memory since shortly before the last look.
        counted: Among which: the processes of its own cgroup, or all of the machine, those of other containers too.
    """

    sizes: tuple[Size, ...]
    room: Room | None = None
    kills: int = 0
    counted: Literal["in its cgroup", "on the node"] = "on the node"


def judge(evidence: MemoryEvidence) -> str | None:
    """Whether a process that was killed, nobody knows by whom, was killed for memory; in words, or None if it seems not so."""
    is_full = evidence.room is not None and evidence.room.share >= _FULL
    is_growing = _is_growing(evidence.sizes)
    told = [grown(evidence.sizes), *_room(evidence.room, is_full)]
    if evidence.kills > 0 and (evidence.counted == "in its cgroup" or is_full or is_growing):
        counted = f"the kernel's count of memory kills {evidence.counted} went up"
        return f"out of memory: {'; '.join([*told, counted])}. {ADVICE}"
    if is_full and is_growing:
        return f"probably out of memory: it was killed, or crashed; {'; '.join(told)}. {ADVICE}"
    return None


def grown(sizes: Sequence[Size]) -> str:
    """How large a process was in the end, and over which time it had become so."""
    last = sizes[-1]
    low = min(size.size_bytes for size in sizes)
    growth = last.size_bytes - low
    if not _is_much(growth, last.size_bytes):
        return f"its resident size was {in_bytes(last.size_bytes)}"
    began = [size for size in sizes if size.size_bytes <= low + growth // 10][-1]
    how_long = in_time(last.at_s - began.at_s)
    return f"its resident size grew from {in_bytes(began.size_bytes)} to {in_bytes(last.size_bytes)} in {how_long}"


def _is_growing(sizes: Sequence[Size]) -> bool:
    last = sizes[-1]
    low = min(size.size_bytes for size in sizes if last.at_s - size.at_s <= _RECENT_S)
    return _is_much(last.size_bytes - low, last.size_bytes)


def _is_much(growth: int, size_bytes: int) -> bool:
    return growth >= max(_GROWN_BYTES, _GROWN * size_bytes)


def _room(room: Room | None, is_full: bool) -> list[str]:
    if room is None:
        return []
    used = f", {in_bytes(room.used_bytes)} of it in use" if is_full else ""
    return [f"{room.of} has {in_bytes(room.limit_bytes)}{used}"]
