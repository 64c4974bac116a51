"""What the workers of a run printed. Runs anywhere, without Ray.

Ray writes the output of each worker process to two files on its node. A worker records in the events ``entered`` and ``left``
which files these are, and what they held then, and in its samples how much they hold. What is on this machine is read here,
what is on other nodes by the command.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.result import Event

#: Begins the lines by which a rank of `raysgd run` marks how far its output has come; they are not shown.
MARK = "::raysgd-output"
STREAMS = ("stdout", "stderr")
#: Sizes that are kept for a rank; where there are more, every second one is removed.
_MAX_SIZES = 4000
#: Bytes that are read at once.
_CHUNK_BYTES = 1 << 20
#: Lines by which Ray's processes say who they are.
_OF_RAY = re.compile(r":(?:actor_name|task_name|job_id):.*")


@dataclass(frozen=True)
class Part:
    """The part of a file that a rank printed in one attempt.

    Attributes:
        node: The node's name, as in events.
        node_id: Ray's id of it.
        begin: Where the attempt begins in the file.
        end: Where it ends; None: at the end of the file.
    """

    attempt: int
    rank: int
    stream: str
    node: str
    node_id: str
    path: str
    begin: int
    end: int | None = None


class GoneError(Exception):
    """A file, or its node, is gone."""


def find_parts(events: Sequence[Event]) -> list[Part]:
    """Return the parts of a run's output, in the order of attempts and ranks, from its events."""
    nodes: dict[int, Mapping[str, Any]] = {}
    found: dict[tuple[int, int, str], Part] = {}
    for event in events:
        data = event.data
        if event.kind == "worker_up":
            nodes[data["rank"]] = data
        elif event.kind in ("entered", "left") and "output" in data:
            for stream, (path, size) in zip(STREAMS, data["output"], strict=True):
                key = (data["attempt"], data["rank"], stream)
                if event.kind == "left":
                    if key in found:
                        found[key] = replace(found[key], end=size)
                    continue
                node = nodes.get(data["rank"], {})
                found[key] = Part(*key, node.get("node", "?"), node.get("node_id", ""), path, size)
    return [found[key] for key in sorted(found)]


class OutputTimes:
    """Collects from the events of a run where the output of its workers is, and how much they had printed at which time.

    Attributes:
        sizes: For each rank ``[seconds since the epoch, attempt, bytes of stdout, bytes of stderr]``, in order.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, list[list[float]]] = {}
        self._events: list[Event] = []
        self._attempts: dict[int, int] = {}

    def add(self, event: Event) -> None:
        """Add an event; those that say nothing of output are ignored."""
        data = event.data
        if event.kind in ("worker_up", "entered", "left"):
            self._events.append(event)
            self._attempts[data["rank"]] = data.get("attempt", 0)
            sizes = [size for _, size in data.get("output", ())]
        else:
            sizes = data.get("output_bytes", []) if event.kind == "sample" else []
        if len(sizes) == len(STREAMS):
            known = self.sizes.setdefault(data["rank"], [])
            known.append([event.timestamp, self._attempts.get(data["rank"], 0), *sizes])
            if len(known) > _MAX_SIZES:
                del known[1::2]

    def parts(self) -> list[Part]:
        """Return the parts of the output; see `find_parts`."""
        return find_parts(self._events)


def read_part(path: str, begin: int, end: int | None) -> bytes | None:
    """Return a part of a file on this machine, at most a chunk of it; None if the file is gone."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            limit = _CHUNK_BYTES if end is None else min(_CHUNK_BYTES, max(0, end - begin))
            return file.read(limit)
    except OSError:
        return None


#: Returns what is in a part of output from a place on, a chunk of it at most, and raises `GoneError`.
ReadPart = Callable[[Part, int], bytes]


def is_here(part: Part) -> bool:
    """Return whether a part is in a file of this machine."""
    return part.node.partition(" ")[0] == socket.gethostname()


def read_here(part: Part, begin: int) -> bytes:
    """Return what is in a part of this machine from ``begin`` on; empty if there is no more.

    Raises:
        GoneError: The file is gone, or is on another node.
    """
    if not is_here(part):
        raise GoneError(f"what workers printed is on {part.node}, and there is no cluster to ask for it")
    if (data := read_part(part.path, begin, part.end)) is None:
        raise gone(part)
    return data


def gone(part: Part) -> GoneError:
    """Return the error of a file that was removed."""
    return GoneError(f"{part.path} on {part.node} is gone: Ray removed it, or its node was started again")


def read_lines(read: ReadPart, part: Part, begin: int, *, aligns: bool) -> tuple[list[tuple[int, str]], int]:
    """Return complete lines of a part, with their places in the file, and the place that follows them.

    Args:
        read: Reads the files.
        part: What to read; at its end, a line may be without an end.
        begin: The place to begin at.
        aligns: Begin after the first end of a line.

    Raises:
        GoneError: The file or its node is gone.
    """
    data = read(part, begin)
    is_last = part.end is not None and begin + len(data) >= part.end
    end = len(data) if is_last else data.rfind(b"\n") + 1
    if end == 0 and len(data) == _CHUNK_BYTES:  # one line that is longer than what is read at once
        end = len(data)
    place = data.find(b"\n") + 1 if aligns else 0
    found: list[tuple[int, str]] = []
    for line in data[place:end].removesuffix(b"\n").split(b"\n") if place < end else []:
        if (text := clean(line)) is not None:
            found.append((begin + place, text))
        place += len(line) + 1
    return found, begin + end


class Lines:
    """Cuts the output of parts into lines, and remembers how far each was read.

    Args:
        read: Reads the files.
    """

    def __init__(self, read: ReadPart) -> None:
        self._read = read
        self._place: dict[tuple[int, int, str], int] = {}
        self._unfinished: dict[tuple[int, int, str], bytes] = {}
        self.gone: dict[str, None] = {}

    def take(self, part: Part, *, is_last: bool) -> Iterator[str]:
        """Yield the new lines of a part; ``is_last``: also an unfinished one."""
        key = (part.attempt, part.rank, part.stream)
        while True:
            place = self._place.get(key, part.begin)
            try:
                data = self._read(part, place)
            except GoneError as error:
                self.gone[str(error)] = None
                return
            self._place[key] = place + len(data)
            *lines, unfinished = (self._unfinished.get(key, b"") + data).split(b"\n")
            self._unfinished[key] = unfinished
            yield from (text for line in lines if (text := clean(line)) is not None)
            if not data:
                break
        if is_last and (text := clean(self._unfinished.pop(key, b""))):
            yield text


def clean(line: bytes) -> str | None:
    """Return the text of a line; None for one that Ray or `raysgd run` wrote for itself."""
    text = line.decode(errors="replace").rstrip("\r")
    before, mark, _ = text.partition(f"{MARK}:")
    return None if _OF_RAY.fullmatch(text) or (mark and not before) else before if mark else text
