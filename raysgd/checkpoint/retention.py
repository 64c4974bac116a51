"""Which checkpoints of a run are kept. A pure policy: records in, decision out; the control plane deletes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from raysgd.errors import ConfigError


class Record(Protocol):
    """What the policy knows of a checkpoint; a `Manifest` is one."""

    @property
    def number(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, Any]: ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the best ``num_to_keep`` by a metric, and always the newest.

    The newest is what training goes on from, so it is kept beyond ``num_to_keep`` where it is none of the best.

    Attributes:
        num_to_keep: How many of the best; None keeps all.
        score_attribute: The metric, ``"a/b"`` for one inside another; None ranks by age, newest best.
        score_order: ``"max"`` or ``"min"`` is best.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise ConfigError(f"num_to_keep={self.num_to_keep} keeps nothing; give an int >= 1, or None for all.")
        if self.score_order not in ("max", "min"):
            raise ConfigError(f"score_order={self.score_order!r} is not known; give 'max' or 'min'.")

    def to_delete(self, records: Iterable[Record]) -> list[int]:
        """Numbers of the checkpoints to delete, oldest first. ``records``: all committed ones of this run."""
        ranked = self._ranked(records)
        if self.num_to_keep is None or len(ranked) <= self.num_to_keep:
            return []
        newest = max(record.number for record in ranked)
        return sorted(record.number for record in ranked[self.num_to_keep :] if record.number != newest)

    def best(self, records: Iterable[R]) -> R | None:
        """The best record; None where there is none, or none has the metric."""
        ranked = self._ranked(records)
        if not ranked or (self.score_attribute is not None and self._score(ranked[0]) == -math.inf):
            return next((record for record in ranked if self._has_score(record)), None)
        return ranked[0]

    def _ranked(self, records: Iterable[R]) -> list[R]:
        """Best first; of equals the newer first."""
        return sorted(
            records, key=lambda record: (self._has_score(record), self._score(record), record.number), reverse=True
        )

    def _has_score(self, record: Record) -> bool:
        return self.score_attribute is None or not math.isnan(metric_value(record.metrics, self.score_attribute))

    def _score(self, record: Record) -> float:
        """Larger is better."""
        if self.score_attribute is None:
            return 0.0
        value = metric_value(record.metrics, self.score_attribute)
        if math.isnan(value):
            return -math.inf
        return value if self.score_order == "max" else -value


def metric_value(metrics: Mapping[str, Any], name: str) -> float:
    """The number called ``name``, or found by following ``a/b`` into nested metrics; NaN where there is none."""
    found: Any = metrics.get(name)
    if name not in metrics:
        found = metrics
        for part in name.split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
    try:
        return float(found) if isinstance(found, numbers.Real) else math.nan
    except OverflowError:  # an int beyond float
        return math.inf if found > 0 else -math.inf
