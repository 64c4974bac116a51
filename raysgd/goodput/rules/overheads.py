"""Time that is spent outside the steps: starting, compiling, evaluation by one rank, callbacks, garbage collection."""

from __future__ import annotations

from statistics import median

from raysgd.goodput.evidence import Evidence, gain_of
from raysgd.goodput.findings import Finding
from raysgd.goodput.rules.stragglers import EXCESS

#: Starting is a cause where it takes this part of a run's time, without the seconds that imports of a framework take anyway.
START_SHARE, IMPORTS_S = 0.3, 5.0


def find_start(evidence: Evidence) -> Finding | None:
    share = evidence.share("starting", "setup", "compiling") - _compiling_share(evidence)
    if not evidence.paces or share - IMPORTS_S * evidence.num_workers / evidence.held_s < START_SHARE:
        return None
    return Finding(
        "start",
        share,
        f"the run took {share:.0%} of its time to start workers, to set up train_func and to compile its first steps.",
        "keep the Trainer for the next run (its workers stay), or do more steps in a run.",
    )


def find_compiling(evidence: Evidence) -> Finding | None:
    share = _compiling_share(evidence)
    return Finding(
        "compiling",
        share,
        f"steps after the first ones compiled again, which took {share:.0%} of the time.",
        "give all batches the same shape (pad the shorter ones), and pass what changes as arrays, not as Python values.",
        evidence.cost_of("compiling")[1],
    )


def _compiling_share(evidence: Evidence) -> float:
    """Return the part of the workers' time in which steps other than the first compiled."""
    step_s = evidence.step_s
    later = [pace.uses.get("compiling", 0.0) for pace in evidence.paces.values() if not pace.has_first]
    return evidence.stepping_share * min(later) / step_s if later and step_s else 0.0


def find_evaluation(evidence: Evidence) -> Finding | None:
    """One rank evaluates, and the others wait for it. What all evaluate is what the user wants."""
    spent = {rank: pace.uses.get("evaluation", 0.0) for rank, pace in evidence.paces.items()}
    if len(spent) < 2 or not evidence.step_s:
        return None
    longest = max(spent, key=lambda rank: spent[rank])
    others_s = median(seconds for rank, seconds in spent.items() if rank != longest)
    waited_s = median(pace.waiting_s for rank, pace in evidence.paces.items() if rank != longest)
    excess_s = spent[longest] - others_s
    if excess_s <= EXCESS * evidence.step_s or waited_s < excess_s / 2:
        return None
    share = excess_s / evidence.step_s
    return Finding(
        "evaluation",
        evidence.stepping_share * share,
        f"{evidence.place_of(longest)} evaluates for {share:.0%} of the time, and the others wait for it.",
        "let each rank evaluate its part: prepare_data_loader(train=False) divides the rows, and gather the sums.",
        gain_of(evidence.step_s, excess_s * (1 - 1 / len(spent))),
        longest,
    )


def find_callbacks(evidence: Evidence) -> Finding | None:
    return _overhead(
        evidence,
        "callbacks",
        "callbacks",
        "callbacks in the workers took {share:.0%} of the time of train_func.",
        "report less often, or run the callback in the driver (runs_in).",
    )


def find_garbage_collection(evidence: Evidence) -> Finding | None:
    return _overhead(
        evidence,
        "garbage collection",
        "garbage",
        "Python's garbage collector took {share:.0%} of the time.",
        "call gc.freeze() before the loop, or gc.disable(), and gc.collect() at the same n-th steps on all ranks.",
    )


def _overhead(evidence: Evidence, cause: str, use: str, text: str, remedy: str) -> Finding | None:
    share, gain = evidence.cost_of(use)
    return Finding(cause, share, text.format(share=share), remedy, gain)
