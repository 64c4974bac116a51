"""Time that is spent beside the steps: starting, compiling, callbacks, garbage collection."""

from __future__ import annotations

from raysgd.goodput.evidence import Evidence
from raysgd.goodput.findings import Finding

#: Starting is a cause where it takes this part of a run's time; a shorter run has nothing else.
START_SHARE = 0.3


def find_start(evidence: Evidence) -> Finding | None:
    share = evidence.share("starting", "setup")
    if share < START_SHARE or not evidence.paces:
        return None
    return Finding(
        "start",
        share,
        f"the run took {share:.0%} of its time to start workers and to set up train_func, before its first step.",
        "keep the Trainer for the next run (its workers stay), or do more steps in a run.",
    )


def find_compiling(evidence: Evidence) -> Finding | None:
    return _overhead(
        evidence,
        "compiling",
        "compiling",
        "compilations took {share:.0%} of the time.",
        "give batches the same shape (drop or pad the last one), or keep a compilation cache.",
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
        "call gc.freeze() before the loop, or gc.disable() and gc.collect() every n-th step.",
    )


def _overhead(evidence: Evidence, cause: str, use: str, text: str, remedy: str) -> Finding | None:
    share = evidence.share(use)
    return Finding(cause, share, text.format(share=share), remedy, 1 / max(1 - share, 1e-9))
