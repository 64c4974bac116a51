"""The results as one JSON document: every sample, its statistics, and the machine. Pure except `load` and `save`.

::

    {"machine": {...},
     "measures": {name: {"title", "units", "measured", "quick",
                         "systems": {name: {"params", "series": {name: {"n", "median", ..., "samples"}}, "errors"}}}},
     "rows": [...]}
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Samples are kept with this many significant digits: more than any clock here is good for.
_DIGITS = 5


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the samples lie, interpolated linearly."""
    return float(np.quantile(samples, share))


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval that holds the true median with 95 % confidence; None for fewer than 6 samples.

    Its ends are the samples whose ranks are 1.96 standard deviations of a binomial distribution below and above the middle
    (Conover, Practical Nonparametric Statistics, 1999, section 3.2). This holds for any distribution of the samples.
    """
    ordered, number = sorted(samples), len(samples)
    if number < 6:
        return None
    reach = 0.98 * math.sqrt(number)
    low, high = math.floor(number / 2 - reach), math.ceil(number / 2 + reach)
    return ordered[max(low, 1) - 1], ordered[min(high + 1, number) - 1]


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of two systems in the same rounds."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def spread_of_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return by how much a system differs from itself, measured twice in the same rounds.

    It is the larger of the median ratio's distance from 1 and half of `median_interval`.
    """
    ratios = [one / other for one, other in zip(times, others, strict=True)]
    low, high = median_interval(ratios) or (min(ratios), max(ratios))
    return max(abs(1 - statistics.median(ratios)), (high - low) / 2)


def summarize(samples: Sequence[float]) -> dict[str, Any]:
    """Return number, median, quartiles and extremes, and the samples themselves."""
    shares = {"median": 0.5, "q1": 0.25, "q3": 0.75, "min": 0, "max": 1}
    figures = {name: rounded(quantile(samples, share)) for name, share in shares.items()}
    return {"n": len(samples), **figures, "samples": [rounded(sample) for sample in samples]}


def rounded(value: float, digits: int = _DIGITS) -> float:
    """Round to ``digits`` significant digits."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def growth(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the exponent ``e`` of ``cost ~ size ** e`` between the first and the last point; 1 is linear."""
    return math.log(costs[-1] / costs[0]) / math.log(sizes[-1] / sizes[0])


Document = dict[str, Any]
_NUMBERS = re.compile(r"\[[-+.\deE,\s]+\]")  # a list of numbers: it is written on one line


def new_document(machine: Mapping[str, Any]) -> Document:
    return {"machine": dict(machine), "measures": {}, "scale": {}, "rows": []}


def begin_measure(
    document: Document, name: str, title: str, units: Mapping[str, str], *, quick: bool, measured: str = ""
) -> None:
    """Replace what the document has of a measure by an empty entry. ``measured``: the day."""
    document["measures"][name] = {
        "title": title,
        "units": dict(units),
        "measured": measured,
        "quick": quick,
        "systems": {},
    }


def add_samples(document: Document, measure: str, system: str, params: Mapping[str, Any], line: Any) -> None:
    """Add the samples of one repetition: ``{"series": {name: samples}}`` or ``{"error": text}``.

    Next to ``"series"``, ``"errors"`` has a text for each failed try.
    """
    systems = document["measures"][measure]["systems"]
    entry = systems.setdefault(system, {"params": dict(params), "series": {}, "errors": []})
    if "error" in line:
        entry["errors"].append(line["error"])
        return
    entry["errors"] += line.get("errors", [])
    for name, samples in line["series"].items():
        before = entry["series"].get(name, {}).get("samples", [])
        if samples:
            entry["series"][name] = summarize([*before, *samples])


def load(path: Path, machine: Mapping[str, Any]) -> Document:
    """Return the document at ``path`` if it was measured on this machine, else a new one."""
    document = read(path)
    return document if document is not None and document.get("machine") == dict(machine) else new_document(machine)


def read(path: Path) -> Document | None:
    """Return the document at ``path``, or None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def save(document: Document, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_NUMBERS.sub(_on_one_line, json.dumps(document, indent=1)) + "\n", encoding="utf-8")


def _on_one_line(numbers: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")
