"""A finding of a rule, all findings of a run, and what could not be seen. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raysgd.goodput.evidence import Evidence

#: A cause that costs less than this part of the workers' time is not named: it lies within what runs differ by.
MIN_SHARE = 0.03
#: Nor what other processes of a node may have caused, if it cost the run fewer seconds: they run in bursts.
MIN_BURST_S = 0.5
_FROM_OTHERS = frozenset({"straggler", "processors", "memory"})
#: A cause has begun within the run if so many parts of its time show that, and one in `_DISSENT` says something else at most.
_MIN_WINDOWS, _DISSENT = 4, 5
#: Below this part of a step, no waiting was seen.
_UNSEEN_SHARE = 1e-3
_UNSEEN = {"horovod": "Horovod", "tensorflow": "TensorFlow", "jax": "JAX"}


@dataclass(frozen=True)
class Finding:
    """A cause that made a run slow.

    Attributes:
        cause: One word: the name of the rule.
        share: The part of the workers' time, without pauses, that it cost.
        text: What was seen, with numbers, and where.
        remedy: What to change.
        gain: How many times as many steps the run would make in a time with the remedy; None if that cannot be said.
        rank: The rank that differs from the others; None: all are alike.
        since: When the cause began, in seconds since the epoch, if it was not there from the beginning of the steps.
    """

    cause: str
    share: float
    text: str
    remedy: str
    gain: float | None = None
    rank: int | None = None
    since: float | None = None


Rule = Callable[[Evidence], Finding | None]


def find_causes(evidence: Evidence, rules: Sequence[Rule]) -> list[Finding]:
    """Return what the rules find, the costliest first; see `MIN_SHARE` and `MIN_BURST_S`."""
    run_s = evidence.held_s / evidence.num_workers
    found = [
        _dated(rule, finding, evidence)
        for rule in rules
        if (finding := rule(evidence)) is not None
        and finding.share >= MIN_SHARE
        and (finding.cause not in _FROM_OTHERS or finding.share * run_s >= MIN_BURST_S)
    ]
    return sorted(found, key=lambda finding: finding.share, reverse=True)


def _dated(rule: Rule, finding: Finding, evidence: Evidence) -> Finding:
    """Add when the cause began, if the rule finds it in the later parts of the time and not in the earlier ones."""
    is_there = []
    for window in evidence.windows:
        there = rule(evidence.within(window))
        is_there.append(there is not None and there.share >= MIN_SHARE and there.rank == finding.rank)
    number = len(is_there)
    if number < _MIN_WINDOWS:
        return finding
    # Of each place, how many parts before it have the cause, and how many from it on do not.
    dissent = [sum(is_there[:place]) + is_there[place:].count(False) for place in range(number)]
    first = min(range(number), key=lambda place: dissent[place])
    if not first or not is_there[first] or dissent[first] * _DISSENT > number:
        return finding
    since = evidence.windows[first].began
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return replace(finding, since=since, text=f"{finding.text.removesuffix('.')}, since {clock}.")


def list_unseen(evidence: Evidence) -> list[str]:
    """Return what could not be seen in a run, which counts as training."""
    paces = evidence.paces.values()
    if len(paces) < 2:
        return []
    if (name := _UNSEEN.get(evidence.backend)) is not None:
        return [f"time in collectives is not visible with {name}"]
    if evidence.backend != "torch":
        return []
    if any(pace.gpu_share is not None for pace in paces):
        return ["time that GPUs spend in collectives is not visible"]
    if all(pace.waiting_s <= _UNSEEN_SHARE * pace.step_s for pace in paces):
        return ["no waiting for other ranks was seen; that in a DistributedDataParallel of your own is not visible"]
    return []
