"""Steps wait in ``save_checkpoint``: it is called too often, or storage is slower than saves are made."""

from __future__ import annotations

from raysgd.goodput.evidence import Evidence
from raysgd.goodput.findings import Finding
from raysgd.goodput.rules.restarts import best_interval_s


def find(evidence: Evidence) -> Finding | None:
    share, number = evidence.share("checkpoint"), len(evidence.savings)
    if not number:
        return None
    best_s = best_interval_s(evidence)
    every = "less often" if best_s is None else f"every {best_s:.0f} s, which costs least for this rate of failures,"
    return Finding(
        "checkpoints",
        share,
        f"train_func stood {share:.0%} of the time in save_checkpoint, {number} times.",
        f"save {every} or to faster storage.",
        evidence.gain_without("checkpoint"),
    )
