"""Failures: steps that are made again, and the time until the ranks train again."""

from __future__ import annotations

from math import sqrt

from raysgd._util.text import in_time
from raysgd.goodput.evidence import Evidence
from raysgd.goodput.findings import Finding

#: Repeated steps are worth a word about saving if they are this part of what failures cost.
REPEATED_PART = 0.3


def find(evidence: Evidence) -> Finding | None:
    if not evidence.failures:
        return None
    share = evidence.share("repeated", "recovering")
    workers = max(1, len(evidence.nodes))
    repeated_s = evidence.totals.get("repeated", 0.0) / workers
    cost_s = repeated_s + evidence.totals.get("recovering", 0.0) / workers
    number = len(evidence.failures)
    text = f"{number} failure{'s' if number > 1 else ''} cost {in_time(cost_s)}"
    remedy = (
        "see the failures with `raysgd status`; spare workers (elastic groups, ScalingConfig(spares=)) shorten the gap."
    )
    if repeated_s >= REPEATED_PART * cost_s and (best_s := best_interval_s(evidence)) is not None:
        text += f", {in_time(repeated_s)} of it in repeated steps"
        remedy = f"save a checkpoint about every {in_time(best_s)}: for this rate of failures that costs least."
    return Finding("restarts", share, f"{text}.", remedy)


def best_interval_s(evidence: Evidence) -> float | None:
    """Return the seconds between checkpoints for which stalls and repeated steps together cost least.

    ``sqrt(2 * stall * time between failures)``: Young, "A first order approximation to the optimum checkpoint interval", 1974.
    None without a checkpoint or without failures.
    """
    if not evidence.savings or not evidence.failures:
        return None
    workers = max(1, len(evidence.nodes))
    stall_s = max(evidence.totals.get("checkpoint", 0.0) / workers / len(evidence.savings), 1e-3)
    return sqrt(2 * stall_s * evidence.held_s / workers / len(evidence.failures))
