"""Samples to figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: Samples are kept with this many significant digits: more than any clock here is good for.
_DIGITS = 5


def quantile(samples: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the samples lie, interpolated between neighbours."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Between which values the median of what was sampled lies, with 95 % confidence; None for fewer than 6 samples.

    The order statistics whose ranks are half the number of samples and 1.96 standard deviations of a binomial
    distribution to either side (Conover, Practical Nonparametric Statistics, 1999, section 3.2), for any distribution.
    """
    ordered, number = sorted(samples), len(samples)
    if number < 6:
        return None
    reach = 0.98 * math.sqrt(number)
    low, high = math.floor(number / 2 - reach), math.ceil(number / 2 + reach)
    return ordered[max(low, 1) - 1], ordered[min(high + 1, number) - 1]


def summarize(samples: Sequence[float]) -> dict[str, Any]:
    """Number, median, quartiles and extremes, beside the samples themselves."""
    return {
        "n": len(samples),
        "median": rounded(quantile(samples, 0.5)),
        "q1": rounded(quantile(samples, 0.25)),
        "q3": rounded(quantile(samples, 0.75)),
        "min": rounded(min(samples)),
        "max": rounded(max(samples)),
        "samples": [rounded(sample) for sample in samples],
    }


def rounded(value: float, digits: int = _DIGITS) -> float:
    """``value`` with ``digits`` significant digits."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def growth(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent ``e`` of ``cost ~ size ** e`` between the first and the last point; 1 is linear."""
    return math.log(costs[-1] / costs[0]) / math.log(sizes[-1] / sizes[0])
