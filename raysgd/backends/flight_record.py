"""What each rank's collectives were when one hangs, and who is behind. Pure.

The records are those of PyTorch's flight recorder
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html), of which the last entry of each group is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """The last collective a rank began in a group.

    Attributes:
        group: The group's name.
        number: Its number among those of the group, the same on all ranks; from 1.
        operation: Such as ``gloo:all_reduce``.
        sizes: The shapes of what went in.
        is_done: It has ended on this rank.
    """

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    is_done: bool

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "sizes": [list(size) for size in self.sizes]}


@dataclass(frozen=True)
class FlightRecord:
    """What a process's collectives were lately.

    Attributes:
        last: The last one of each group.
        dump: All that is known of them, in the framework's own form.
    """

    last: tuple[Collective, ...]
    dump: bytes


def last_collectives(dump: Mapping[str, Any]) -> tuple[Collective, ...]:
    """The last one of each group, of what PyTorch dumps."""
    last: dict[str, Collective] = {}
    for entry in dump.get("entries", ()):
        if not entry["is_p2p"]:
            group = _name_of(*entry["process_group"])
            sizes = tuple(tuple(size) for size in entry["input_sizes"])
            is_done = entry["retired"] or entry["state"] == "completed"
            last[group] = Collective(group, entry["collective_seq_id"], entry["profiling_name"], sizes, is_done)
    return tuple(last.values())


def _name_of(name: str, description: str) -> str:
    """A group as it is shown. Names are the same on all ranks of a group; several groups may have one description."""
    if description in ("", "undefined"):
        return name
    return description if description == "default_pg" else f"{description} ({name})"


def who_is_behind(by_rank: Mapping[int, Sequence[Collective]], ranks: Collection[int]) -> str | None:
    """A sentence on those of ``ranks`` that others wait for in a collective; None where nobody waits, or all do."""
    for group in dict.fromkeys(each.group for those in by_rank.values() for each in those):
        here = {rank: each for rank, those in by_rank.items() for each in those if each.group == group}
        waiting = {rank: each for rank, each in here.items() if not each.is_done}
        newest = max((each.number for each in waiting.values()), default=0)
        behind = [rank for rank, each in here.items() if each.number < newest]
        silent = set(ranks) - set(by_rank)
        there = {rank: each for rank, each in waiting.items() if each.number == newest}
        if there and (behind or silent):
            operation = next(iter(there.values())).operation
            told = f"{_ranks(there, 'waits', 'wait')} in collective {newest} of {group} ({operation})"
            if behind:
                return f"{told}, which {_ranks(behind, 'has', 'have')} not begun"
            return f"{told}, and {_ranks(silent, 'does', 'do')} not say where"
        differing = {each.operation: rank for rank, each in here.items() if each.number == newest}
        if len(differing) > 1:
            told = ", ".join(f"rank {rank} {operation}" for operation, rank in sorted(differing.items()))
            return f"collective {newest} of {group} is not the same on all ranks: {told}"
    return None


def _ranks(ranks: Collection[int], verb: str, of_several: str) -> str:
    named = ", ".join(map(str, sorted(ranks)))
    return f"rank {named} {verb}" if len(ranks) == 1 else f"ranks {named} {of_several}"
