"""A rank computes longer than the others, which wait for it."""

from __future__ import annotations

from statistics import median

from raysgd.goodput.evidence import Evidence, Pace, gain_of
from raysgd.goodput.findings import Finding

#: A rank is slow if its own time is above the others' median by this part of a step, and they wait at least half as long for it.
EXCESS = 0.05
#: The processors are the cause if the rank waited for them for this part of the difference.
CPU_PART = 0.5


def find(evidence: Evidence) -> Finding | None:
    own = {rank: _computing_s(pace) for rank, pace in evidence.paces.items()}
    step_s = evidence.step_s
    if len(own) < 2 or not step_s:
        return None
    slowest = max(own, key=lambda rank: own[rank])
    others = [pace for rank, pace in evidence.paces.items() if rank != slowest]
    others_s = median(_computing_s(pace) for pace in others)
    excess_s = own[slowest] - others_s
    waited_s = median(pace.uses.get("waiting", 0.0) for pace in others)
    if excess_s < EXCESS * step_s or waited_s < excess_s / 2:
        return None
    pace, node = evidence.paces[slowest], evidence.nodes.get(slowest)
    why, remedy = "", "see what else runs there, or exclude the node."
    if pace.cpu_wait_s >= CPU_PART * excess_s:
        busy = evidence.busy.get(slowest, "other processes")
        why = f"; {busy} had its processors for {pace.cpu_wait_s / pace.step_s:.0%} of the time"
        remedy = "give its node to this run alone, or exclude the node."
    return Finding(
        "straggler",
        evidence.stepping_share * excess_s / step_s,
        f"rank {slowest}{f' on {node}' if node else ''} computes {own[slowest] / max(others_s, 1e-9):.2f}x as long as the others"
        f"{why}.",
        remedy,
        gain_of(step_s, excess_s),
    )


def _computing_s(pace: Pace) -> float:
    return pace.own_s - sum(pace.uses.get(use, 0.0) for use in ("data", "checkpoint", "callbacks", "compiling"))
