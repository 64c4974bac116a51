"""Failures: steps that are made again, and the time until the ranks train again."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from statistics import median

from raysgd._util.text import in_time
from raysgd.goodput.evidence import Evidence, gain_of
from raysgd.goodput.findings import Finding

#: Repeated steps are worth a word about saving if they are this part of what failures cost.
REPEATED_PART = 0.3


def find(evidence: Evidence) -> Finding | None:
    number, workers = evidence.num_failures, evidence.num_workers
    if not number:
        return None
    repeated_s, recovering_s = (evidence.totals.get(use, 0.0) / workers for use in ("repeated", "recovering"))
    cost_s = repeated_s + recovering_s
    text = f"{number} failure{'s' if number > 1 else ''} cost {in_time(cost_s)}"
    remedy, gain = (
        "see them with `raysgd status`; spares (ScalingConfig(spares=)) shorten the time until workers train again.",
        None,
    )
    if repeated_s >= REPEATED_PART * cost_s:
        text += f", {in_time(repeated_s)} of it in repeated steps"
        remedy, gain = _save_more(evidence, repeated_s)
    return Finding("restarts", evidence.share("repeated", "recovering"), f"{text}.", remedy, gain)


def _save_more(evidence: Evidence, repeated_s: float) -> tuple[str, float | None]:
    """Return what to do about repeated steps, and how many times as many steps that makes in a time."""
    best_s, interval_s, held_s = (
        best_interval_s(evidence),
        saving_interval_s(evidence),
        evidence.held_s / evidence.num_workers,
    )
    live = "with raysgd.live_state a death costs one step"
    if best_s is None:
        return f"save checkpoints in the loop, none was saved; {live}.", None
    if interval_s is None or best_s >= interval_s:
        return f"{live}; checkpoints are saved often enough.", None
    stall_s = evidence.stall_s
    # A failure comes in the middle of an interval, and what is still being written is lost too.
    expected_s = min(
        repeated_s, evidence.num_failures * (best_s / 2 + median(each.write_s for each in evidence.savings))
    )
    more_s = stall_s * held_s * (1 / best_s - 1 / interval_s)
    often, rare = (_in_steps(evidence, seconds) for seconds in (best_s, interval_s))
    text = (
        f"save_checkpoint every {often} instead of {rare}: {in_time(expected_s)} of repeated steps, "
        f"for {stall_s / best_s:.1%} of stall; {live}."
    )
    return text, gain_of(held_s, repeated_s - expected_s - more_s)


def _in_steps(evidence: Evidence, seconds: float) -> str:
    return f"{max(1, round(seconds / evidence.step_s))} steps" if evidence.step_s else in_time(seconds)


def saving_interval_s(evidence: Evidence) -> float | None:
    """Return the seconds of steps between checkpoints; None without any."""
    savings = evidence.savings
    if not savings:
        return None
    gaps = [after.at - before.at for before, after in pairwise(savings) if after.attempt == before.attempt]
    stepping_s = evidence.held_s * (evidence.stepping_share + evidence.share("repeated")) / evidence.num_workers
    return median(gaps) if gaps else stepping_s / len(savings)


def best_interval_s(evidence: Evidence) -> float | None:
    """Return the seconds between checkpoints for which stalls and repeated steps together cost least.

    Daly, "A higher order estimate of the optimum checkpoint interval", 2006, of which the first term is that of Young, 1974. Not
    shorter than a checkpoint takes to write. None without a checkpoint or without failures.
    """
    if not evidence.savings or not evidence.num_failures:
        return None
    stall_s = max(evidence.stall_s, 1e-3)
    between_s = evidence.held_s / evidence.num_workers / evidence.num_failures
    ratio = stall_s / (2 * between_s)
    best_s = between_s if ratio >= 1 else sqrt(2 * stall_s * between_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s
    return max(best_s, median(each.write_s for each in evidence.savings), evidence.step_s)
