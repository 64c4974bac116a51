"""Finds the ranks that a hanging collective waits for, from the records of PyTorch's flight recorder. Pure.

See https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html; only the last entry of each group counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank began in a process group.

    Attributes:
        number: The collective's sequence number in the group, from 1; the same on all ranks.
        operation: For example ``gloo:all_reduce``.
        sizes: The shapes of the inputs.
        is_done: The collective has ended on this rank.
        began_ns: When this rank began it, in nanoseconds since the epoch.
        ranks: The ranks of the group; empty if they are unknown.
    """

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    is_done: bool
    began_ns: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """The collective in words, such as ``collective 7 of default_pg (gloo:all_reduce)``."""
        if not self.operation:  # of raysgd itself
            return f"call {self.number} of {self.group}"
        return f"collective {self.number} of {self.group} ({self.operation})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**vars(self), "sizes": [list(size) for size in self.sizes], "ranks": list(self.ranks)}


@dataclass(frozen=True)
class FlightRecord:
    """The last collective of each group of a process, and the whole record in the framework's own format."""

    last: tuple[Collective, ...]
    dump: bytes


def last_collectives(
    dump: Mapping[str, Any], since_ns: int = 0, ranks: Mapping[str, Sequence[int]] | None = None
) -> tuple[Collective, ...]:
    """Return the last collective of each group in a dump of PyTorch's flight recorder.

    Args:
        dump: The dump, unpickled.
        since_ns: Leave out what began before, in nanoseconds since the epoch: the groups of earlier attempts had the same
            names.
        ranks: The ranks of each group, by `display_name`, which the dump does not have for gloo.
    """
    last: dict[str, Mapping[str, Any]] = {}
    for entry in dump.get("entries", ()):
        if not entry["is_p2p"] and entry["time_created_ns"] >= since_ns:
            last[display_name(*entry["process_group"])] = entry
    return tuple(
        Collective(
            group,
            number=entry["collective_seq_id"],
            operation=entry["profiling_name"],
            sizes=tuple(tuple(size) for size in entry["input_sizes"]),
            is_done=entry["retired"] or entry["state"] == "completed",
            began_ns=entry["time_created_ns"],
            ranks=tuple((ranks or {}).get(group, ())),
        )
        for group, entry in last.items()
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
        operations = {last.operation: rank for rank, last in in_group.items() if last.number == newest}
        if len(operations) > 1:
            listed = ", ".join(f"rank {rank} {operation}" for operation, rank in sorted(operations.items()))
            return f"collective {newest} of {group} is not the same on all ranks: {listed}"
    return None


def name_ranks(ranks: Collection[int], singular: str, plural: str) -> str:
    """Return the ranks with a verb: ``rank 1 waits``, ``ranks 0, 2 wait``."""
    listed = ", ".join(map(str, sorted(ranks)))
    return f"rank {listed} {singular}" if len(ranks) == 1 else f"ranks {listed} {plural}"
