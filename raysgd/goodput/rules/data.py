"""Steps wait for batches: on all ranks, or on some, for which the others then wait."""

from __future__ import annotations

from statistics import median

from raysgd.goodput.evidence import Evidence, gain_of
from raysgd.goodput.findings import Finding

#: A rank waits more than the others if it waits this many times as long, and this part of its step longer.
FACTOR, EXCESS = 2.0, 0.05
_PREFETCH = "read batches ahead (prefetch= of a dataset, num_workers= of a DataLoader), or read faster storage"


def find(evidence: Evidence) -> Finding | None:
    waits = {rank: pace.uses.get("data", 0.0) for rank, pace in evidence.paces.items()}
    step_s = evidence.step_s
    if not waits or not step_s:
        return None
    slowest = max(waits, key=lambda rank: waits[rank])
    longest_s = waits[slowest]
    others_s = median(wait_s for rank, wait_s in waits.items() if rank != slowest) if len(waits) > 1 else longest_s
    if longest_s > FACTOR * others_s and longest_s - others_s > EXCESS * step_s:
        if not evidence.sees_own_data:
            return None
        saved_s = longest_s - others_s  # the other ranks wait for it, unless they train alone
        step_s = evidence.paces[slowest].step_s
        return Finding(
            "data",
            evidence.stepping_share * saved_s / step_s,
            f"{evidence.place_of(slowest)} waits {longest_s / step_s:.0%} of its steps for batches, "
            f"the others {others_s / step_s:.0%}.",
            f"see what rank {slowest} reads and from where; {_PREFETCH}.",
            gain_of(step_s, saved_s),
            slowest,
        )
    saved_s = min(longest_s, step_s - longest_s)  # read ahead: reading and computing at the same time
    return Finding(
        "data",
        evidence.stepping_share * longest_s / step_s,
        f"steps wait {longest_s / step_s:.0%} of their time for batches.",
        f"{_PREFETCH}.",
        gain_of(step_s, saved_s),
    )
