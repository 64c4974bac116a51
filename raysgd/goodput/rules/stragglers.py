"""A rank computes longer than the others, which wait for it, and its batches do not explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import median

from raysgd.goodput.evidence import STANDARD_ERRORS, Evidence, Pace, gain_of
from raysgd.goodput.findings import Finding
from raysgd.goodput.rules import machines

#: A rank is slow if its own time is above the others' median by this part of a step, and they wait at least half as long for it,
#: or make that much shorter steps.
EXCESS = 0.05
#: The processors are the cause, or the batches, if they explain this part of the difference.
EXPLAINED = 0.5


@dataclass(frozen=True)
class Slowest:
    """The rank that computes longest, for which the others wait.

    Attributes:
        pace: Its steps.
        others: Those of the others.
        others_s: The median of the others' seconds of computing per step.
        excess_s: How many seconds per step it computes longer.
    """

    rank: int
    pace: Pace
    others: Mapping[int, Pace]
    others_s: float
    excess_s: float

    @property
    def has_larger_batches(self) -> bool:
        """Whether its batches have so many more values than those of the others that this is the cause."""
        own, size = self.pace.batches, self._size_of_others
        if own is None or not size:
            return False
        # Where batches differ, what a value takes is known; else the time is taken to be proportional.
        value_s = own.value_s or self.others_s / size
        return own.values > size and value_s * (own.values - size) >= EXPLAINED * self.excess_s

    @property
    def has_larger_batches_by_chance(self) -> bool:
        """Whether it may have got larger batches by chance, in so few steps, because all batches differ in size."""
        own, size = self.pace.batches, self._size_of_others
        return own is not None and own.values - size < STANDARD_ERRORS * own.spread * sqrt(2 / self.pace.steps)

    @property
    def _size_of_others(self) -> float:
        sizes = [each.batches.values for each in self.others.values() if each.batches is not None]
        return median(sizes) if sizes else 0.0


def find_slowest(evidence: Evidence) -> Slowest | None:
    """Return the rank that the others wait for because it computes longest; None if there is none."""
    own = {rank: pace.computing_s for rank, pace in evidence.paces.items()}
    if len(own) < 2 or not evidence.step_s:
        return None
    slowest = max(own, key=lambda rank: own[rank])
    others = {rank: pace for rank, pace in evidence.paces.items() if rank != slowest}
    others_s = median(pace.computing_s for pace in others.values())
    excess_s = own[slowest] - others_s
    pace = evidence.paces[slowest]
    waited_s = median(each.waiting_s for each in others.values())
    slower_s = pace.step_s - median(each.step_s for each in others.values())  # of ranks that train alone
    if excess_s < EXCESS * pace.step_s or max(waited_s, slower_s) < excess_s / 2:
        return None
    return Slowest(slowest, pace, others, others_s, excess_s)


def find(evidence: Evidence) -> Finding | None:
    slowest = find_slowest(evidence)
    if slowest is None or slowest.has_larger_batches:
        return None
    pace, saved_s = slowest.pace, slowest.excess_s
    why, remedy = "", "see what else runs there, or exclude the node."
    if pace.cpu_wait_s >= EXPLAINED * saved_s:
        if machines.is_from_writing(evidence):
            return None
        busy = evidence.busy.get(slowest.rank, "other processes")
        why = f"; {busy} had its processors for {pace.cpu_wait_s / pace.step_s:.0%} of the time"
        first = "end that process" if slowest.rank in evidence.busy else "give its node to this run alone"
        remedy = f"{first}, or exclude the node."
        # Whatever the rank does takes longer, and the others wait for all of it. Those of its node lose something too.
        own_s, cpu_wait_s = [], []
        for rank, each in slowest.others.items():
            shares_node = evidence.nodes.get(rank) == evidence.nodes.get(slowest.rank)
            own_s.append(each.own_s - each.cpu_wait_s * shares_node)
            cpu_wait_s.append(each.cpu_wait_s)
        saved_s = max(pace.own_s - median(own_s), pace.cpu_wait_s - median(cpu_wait_s))
    longer = (slowest.others_s + slowest.excess_s) / max(slowest.others_s, 1e-9)
    return Finding(
        "straggler",
        evidence.stepping_share * saved_s / pace.step_s,
        f"{evidence.place_of(slowest.rank)} computes {longer:.2f}x as long as the others{why}.",
        remedy,
        gain_of(pace.step_s, saved_s),
        slowest.rank,
    )
