"""Chooses few combinations of factors in which every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Combination = dict[str, Any]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Combination]:
    """Return combinations that have every pair of values of two factors, chosen greedily; always the same ones."""
    names = list(factors)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a in factors[one]
        for b in factors[other]
    }
    candidates = list(product(factors))
    chosen = []
    while missing:
        best = max(candidates, key=lambda candidate: len(_pairs(candidate) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def product(factors: Mapping[str, Sequence[Any]]) -> Iterator[Combination]:
    """Yield all combinations."""
    for values in itertools.product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def _pairs(combination: Combination) -> set[Any]:
    return set(itertools.combinations(combination.items(), 2))
