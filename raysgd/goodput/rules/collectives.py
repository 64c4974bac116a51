"""All ranks wait as long for each other: what they exchange takes long, and no rank is the cause."""

from __future__ import annotations

from raysgd.goodput.evidence import Evidence, gain_of
from raysgd.goodput.findings import Finding

#: Below this part of a step, exchanging is what data parallelism costs.
SHARE = 0.2


def find(evidence: Evidence) -> Finding | None:
    waits = [pace.uses.get("waiting", 0.0) for pace in evidence.paces.values()]
    if len(waits) < 2 or not evidence.step_s or (share := min(waits) / evidence.step_s) < SHARE:
        return None
    return Finding(
        "collectives",
        evidence.stepping_share * share,
        f"exchanging gradients and states takes {share:.0%} of a step on every rank, {min(waits) * 1e3:.0f} ms.",
        "make larger batches or accumulate gradients; see the cables with `raysgd doctor --cluster`.",
        gain_of(evidence.step_s, min(waits) / 2),  # accumulating over two batches
    )
