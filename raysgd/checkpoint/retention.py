"""Decides which checkpoints of a run are kept. A pure policy: records in, decision out; the control plane deletes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


class Record(Protocol):
    """What the policy needs to know about a checkpoint; a `Manifest` satisfies it."""

    @property
    def number(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, Any]: ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the best ``num_to_keep`` by a metric, and always the newest.

    Training resumes from the newest, so it is kept in addition to ``num_to_keep`` if it is not among the best.

    Attributes:
        num_to_keep: Number of best checkpoints to keep; None keeps all.
        score_attribute: The metric, ``"a/b"`` for a nested one; None ranks by age, newest first.
        score_order: ``"max"`` or ``"min"`` is best.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"

    def to_delete(self, records: Iterable[Record]) -> list[int]:
        """Return the numbers of the checkpoints to delete, oldest first.

        Args:
            records: All committed checkpoints of this run.
        """
        ranked = self._ranked(records)
        if self.num_to_keep is None or len(ranked) <= self.num_to_keep:
            return []
        newest = max(record.number for record in ranked)
        return sorted(record.number for record in ranked[self.num_to_keep :] if record.number != newest)

    def best(self, records: Iterable[R]) -> R | None:
        """Return the best record; None if no record has the metric."""
        return next((record for record in self._ranked(records) if self._rank(record)[0]), None)

    def _ranked(self, records: Iterable[R]) -> list[R]:
        return sorted(records, key=self._rank, reverse=True)

    def _rank(self, record: Record) -> tuple[bool, float, int]:
        """Return what is larger for a better record: whether it has the metric, its score, and its age."""
        value = 0.0 if self.score_attribute is None else metric_value(record.metrics, self.score_attribute)
        if math.isnan(value):
            return False, 0.0, record.number
        return True, value if self.score_order == "max" else -value, record.number


def metric_value(metrics: Mapping[str, Any], name: str) -> float:
    """Return the metric ``name``, or what ``a/b`` finds in nested metrics; NaN if there is no such number."""
    found: Any = metrics.get(name)
    if name not in metrics:
        found = metrics
        for part in name.split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
    try:
        return float(found) if isinstance(found, numbers.Real) else math.nan
    except OverflowError:  # an int too large for a float
        return math.inf if found > 0 else -math.inf
