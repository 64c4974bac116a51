"""Decides which checkpoints of a run are kept. A pure policy: records in, decision out; the control plane deletes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from raysgd.errors import ConfigError


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

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise ConfigError(f"num_to_keep={self.num_to_keep} is not allowed: give an int >= 1, or None to keep all.")
        if self.score_order not in ("max", "min"):
            raise ConfigError(f"score_order={self.score_order!r} is not known: give 'max' or 'min'.")

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
        ranked = self._ranked(records)
        if not ranked or (self.score_attribute is not None and self._score(ranked[0]) == -math.inf):
            return next((record for record in ranked if self._has_score(record)), None)
        return ranked[0]

    def _ranked(self, records: Iterable[R]) -> list[R]:
        """Sort best first, and the newer first of equal ones."""
        return sorted(
            records, key=lambda record: (self._has_score(record), self._score(record), record.number), reverse=True
        )

    def _has_score(self, record: Record) -> bool:
        return self.score_attribute is None or not math.isnan(metric_value(record.metrics, self.score_attribute))

    def _score(self, record: Record) -> float:
        """Return a score of which larger is better."""
        if self.score_attribute is None:
            return 0.0
        value = metric_value(record.metrics, self.score_attribute)
        if math.isnan(value):
            return -math.inf
        return value if self.score_order == "max" else -value


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
