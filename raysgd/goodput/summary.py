"""What is shown of a run's time: by use, rank and period, with the causes of slowness. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from raysgd.goodput.evidence import Evidence
from raysgd.goodput.findings import find_causes, list_unseen
from raysgd.goodput.ledger import PAUSED, Slice, goodput_of
from raysgd.goodput.rules import RULES

#: Into how many equal periods a run is divided.
NUM_PERIODS = 120
_DIGITS = 4  # of seconds: a summary of a thousand ranks stays small


def summarize(evidence: Evidence) -> dict[str, Any]:
    """Return what is shown of a run's time, as JSON can hold it.

    Returns:
        ``goodput``: see `Ledger.goodput`; ``seconds`` of all workers by use, and ``shares``: their parts of the time without
        pauses; ``ranks``: the seconds of each rank, and ``periods``: those of equal parts of the run, from ``began`` on, each
        ``period_s`` long; ``length_s`` of the run; ``causes``: see `Finding`; ``unseen``: see `list_unseen`.
    """
    ledger = evidence.ledger
    began = ledger.now - ledger.length_s
    return {
        "goodput": goodput_of(evidence.totals),
        "seconds": _rounded(evidence.totals),
        "shares": {use: seconds / evidence.held_s for use, seconds in evidence.totals.items() if use != PAUSED},
        "ranks": {str(rank): _rounded(uses) for rank, uses in ledger.by_rank().items()},
        "began": began,
        "length_s": ledger.length_s,
        "period_s": ledger.length_s / NUM_PERIODS,
        "periods": [_rounded(uses) for uses in divide(ledger.slices(), began, ledger.length_s)],
        "causes": [vars(finding) for finding in find_causes(evidence, RULES)],
        "unseen": list_unseen(evidence),
    }


def divide(slices: Iterable[Slice], began: float, length_s: float) -> list[dict[str, float]]:
    """Return the seconds of all workers by use in each of `NUM_PERIODS` equal periods; none if the length is 0."""
    if not length_s:
        return []
    period_s = length_s / NUM_PERIODS
    periods: list[Counter[str]] = [Counter() for _ in range(NUM_PERIODS)]
    for start, end, uses in ((each.start - began, each.end - began, each.uses) for each in slices):
        last = min(int(end / period_s), NUM_PERIODS - 1)
        for place in range(min(int(start / period_s), last), last + 1):
            until = length_s if place == NUM_PERIODS - 1 else (place + 1) * period_s
            part = (min(end, until) - max(start, place * period_s)) / (end - start) if end > start else 0.0
            if part > 0:
                periods[place].update({use: seconds * part for use, seconds in uses.items()})
    return [dict(period) for period in periods]


def _rounded(uses: Mapping[str, float]) -> dict[str, float]:
    return {use: rounded for use, seconds in uses.items() if (rounded := round(seconds, _DIGITS))}
