"""A finding of a rule, and all findings of a run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raysgd.goodput.evidence import Evidence

#: A cause that costs less than this part of the workers' time is not named: it lies within what runs differ by.
MIN_SHARE = 0.03


@dataclass(frozen=True)
class Finding:
    """A cause that made a run slow.

    Attributes:
        cause: One word: the name of the rule.
        share: The part of the workers' time, without pauses, that it cost.
        text: What was seen, with numbers, and where.
        remedy: What to change.
        gain: How many times as fast the run would be without the cause; None if that cannot be said.
    """

    cause: str
    share: float
    text: str
    remedy: str
    gain: float | None = None


Rule = Callable[[Evidence], Finding | None]


def find_causes(evidence: Evidence, rules: Sequence[Rule]) -> list[Finding]:
    """Return what the rules find, the costliest first; none below `MIN_SHARE`."""
    found = [finding for rule in rules if (finding := rule(evidence)) is not None and finding.share >= MIN_SHARE]
    return sorted(found, key=lambda finding: finding.share, reverse=True)
