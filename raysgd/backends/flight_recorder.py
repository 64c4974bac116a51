"""Finds the ranks that a hanging collective waits for, from the records of PyTorch's flight recorder. Pure.

See https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html; only the last entry of each group counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Operations that need inputs of as many elements on every rank. An all-to-all, for one, may have other splits on each rank.
_EQUAL_SIZES = frozenset(
    ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "_all_gather_base", "_reduce_scatter_base")
)
#: Names of dtypes in the record, where torch has another one.
_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "byte": "uint8"}

#: The group and the number of a collective, by which one rank is asked what another one waits in.
CollectiveId = tuple[str, int]
#: What a rank does in a send or receive; empty for collectives.
Transfer = Literal["send", "receive", "receive from any rank", ""]
FROM_ANY: Transfer = "receive from any rank"


@dataclass(frozen=True)
class Collective:
    """A collective that a rank began in a process group, or a send or receive: a collective of two ranks.

    Attributes:
        group: The name of the process group. For sends and receives it also has the direction.
        number: The collective's sequence number in the group, from 1; the same on all ranks.
        operation: For example ``gloo:all_reduce``; empty if it is unknown.
        sizes: The shapes of the inputs.
        is_done: The collective has ended on this rank.
        began_ns: When this rank began it, in nanoseconds since the epoch.
        ranks: The ranks of the group; empty if they are unknown.
        dtypes: The dtypes of the inputs, as the record names them.
        transfer: A send, a receive, or a receive from any rank.
    """

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    is_done: bool
    began_ns: int = 0
    ranks: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    transfer: Transfer = ""

    @property
    def place(self) -> str:
        """The collective in words, such as ``collective 7 of default_pg (gloo:all_reduce)``."""
        if self.transfer:
            return f"{self.transfer.split()[0]} {self.number} of {self.group}"
        if not self.operation:  # of raysgd itself
            return f"call {self.number} of {self.group}"
        return f"collective {self.number} of {self.group} ({self.operation})"

    @property
    def id(self) -> CollectiveId:
        """The group and the number."""
        return self.group, self.number

    @property
    def place_and_content(self) -> str:
        """The collective in words with its sizes and dtypes."""
        return self.place.replace(f"({self.operation})", f"({self.content})")

    @property
    def content(self) -> str:
        """The operation with its sizes and dtypes, such as ``gloo:all_reduce of 12 float32``."""
        dtypes = "/".join(dict.fromkeys(_DTYPES.get(name.lower(), name.lower()) for name in self.dtypes))
        return f"{self.operation} of {self._num_elements()} {dtypes}".rstrip() if self.sizes else self.operation

    def matches(self, other: Collective) -> bool:
        """Return True if this and ``other``, of the same number in the same group, can complete each other.

        What one of them does not know is taken for equal.
        """
        if self.transfer or other.transfer or not (self.operation and other.operation):
            return True
        if self.operation != other.operation:
            return False
        if self.operation.rpartition(":")[2] not in _EQUAL_SIZES or not (self.sizes and other.sizes):
            return True
        has_same_dtypes = not (self.dtypes and other.dtypes) or set(self.dtypes) == set(other.dtypes)
        return has_same_dtypes and self._num_elements() == other._num_elements()

    def is_asked_for(self, asked: CollectiveId) -> bool:
        """Return True if the rank that began this has begun what another rank asks for."""
        group, number = asked
        return self.group == group and (self.number == number or (bool(self.transfer) and self.number > number))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        listed = {"sizes": [list(size) for size in self.sizes], "ranks": list(self.ranks), "dtypes": list(self.dtypes)}
        return {**vars(self), **listed}

    def _num_elements(self) -> int:
        return sum(map(math.prod, self.sizes))


@dataclass(frozen=True)
class FlightRecord:
    """A framework's record of the collectives of a process.

    Attributes:
        last: The last collective of each group, and the sends and receives that are not done.
        dump: The whole record in the framework's own format.
        entries: All that is recorded, the oldest first; of sends and receives the last one for each other rank and direction.
    """

    last: tuple[Collective, ...]
    dump: bytes
    entries: tuple[Collective, ...] = ()


def read_collectives(
    dump: Mapping[str, Any], since_ns: int = 0, ranks: Mapping[str, Sequence[int]] | None = None
) -> tuple[Collective, ...]:
    """Return all collectives in a dump of PyTorch's flight recorder, the oldest first.

    Args:
        dump: The dump, unpickled.
        since_ns: Leave out what began before, in nanoseconds since the epoch: the groups of earlier attempts had the same
            names.
        ranks: The ranks of each group, by `display_name`, which the dump does not have for gloo.
    """
    return tuple(
        _read_entry(entry, ranks or {})
        for entry in dump.get("entries", ())
        if not entry["is_p2p"] and entry["time_created_ns"] >= since_ns
    )


def last_of_each_group(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the last collective of each group, of collectives in their order."""
    return tuple({one.group: one for one in collectives}.values())


def _read_entry(entry: Mapping[str, Any], ranks: Mapping[str, Sequence[int]]) -> Collective:
    group = display_name(*entry["process_group"])
    side = (
        "output" if entry["profiling_name"].endswith(":scatter") else "input"
    )  # only one rank has an input to scatter
    return Collective(
        group,
        number=entry["collective_seq_id"],
        operation=entry["profiling_name"],
        sizes=tuple(tuple(size) for size in entry[f"{side}_sizes"]),
        is_done=entry["retired"] or entry["state"] == "completed",
        began_ns=entry["time_created_ns"],
        ranks=tuple(ranks.get(group, ())),
        dtypes=tuple(entry.get(f"{side}_dtypes", ())),
    )


def numbers_only(numbers: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the last collective of each group, of which only the number is known."""
    return tuple(Collective(group, number, "", (), is_done=True) for group, number in numbers.items())


def display_name(name: str, description: str) -> str:
    """Return a process group's name for users.

    Args:
        name: The same on all ranks of a group.
        description: Several groups may share one.
    """
    if description in ("", "undefined"):
        return name
    return description if description == "default_pg" else f"{description} ({name})"


def explain_hang(by_rank: Mapping[int, Sequence[Collective]], ranks: Collection[int]) -> str | None:
    """Say which of ``ranks`` the others wait for in a collective; None if no rank waits, or all ranks do."""
    for group in dict.fromkeys(last.group for collectives in by_rank.values() for last in collectives):
        in_group = {rank: last for rank, collectives in by_rank.items() for last in collectives if last.group == group}
        waiting = {rank: last for rank, last in in_group.items() if not last.is_done}
        newest = max((last.number for last in waiting.values()), default=0)
        behind = [rank for rank, last in in_group.items() if last.number < newest]
        silent = set(ranks) - set(by_rank)
        in_newest = {rank: last for rank, last in waiting.items() if last.number == newest}
        if in_newest and (behind or silent):
            waits = f"{name_ranks(in_newest, 'waits', 'wait')} in {next(iter(in_newest.values())).place}"
            if behind:
                return f"{waits}, which {name_ranks(behind, 'has', 'have')} not begun"
            return f"{waits}; {name_ranks(silent, 'has', 'have')} not answered"
        there = {rank: last for rank, last in in_group.items() if last.number == newest}
        if not all(last.matches(other) for last in there.values() for other in list(there.values())[:1]):
            contents = {last.content: rank for rank, last in there.items()}
            listed = ", ".join(f"rank {rank} {content}" for content, rank in sorted(contents.items()))
            return f"collective {newest} of {group} is not the same on all ranks: {listed}"
    return None


def name_ranks(ranks: Collection[int], singular: str, plural: str) -> str:
    """Return the ranks with a verb: ``rank 1 waits``, ``ranks 0, 2 wait``."""
    listed = ", ".join(map(str, sorted(ranks)))
    return f"rank {listed} {singular}" if len(ranks) == 1 else f"ranks {listed} {plural}"
