"""Decides which checkpoints of a run are kept. A pure policy: records in, decision out; the control plane deletes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from raysgd._util.metric_names import find_metric, flatten, listed, nearest


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

    Training resumes from the newest, so it is kept in addition to ``num_to_keep`` if it is not among the best. While no
    checkpoint has the metric, nobody knows which is the best, and none is deleted.

    Attributes:
        num_to_keep: Number of best checkpoints to keep; None keeps all.
        score_attribute: The metric, ``"a/b"`` for a nested one; None ranks by age, newest first.
        score_order: ``"max"`` or ``"min"`` is best.
        keep_best: Further metrics, and whether their highest or lowest value is best: the best checkpoint by each is kept in
            addition.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"
    keep_best: Mapping[str, str] = field(default_factory=dict)

    def to_delete(self, records: Iterable[Record]) -> list[int]:
        """Return the numbers of the checkpoints to delete, oldest first.

        Args:
            records: All committed checkpoints of this run.
        """
        ranked = self._ranked(records)
        if self.num_to_keep is None or len(ranked) <= self.num_to_keep:
            return []
        if not any(self.can_rank(record.metrics) for record in ranked):
            return []
        kept = {max(record.number for record in ranked)}
        for metric, order in self.keep_best.items():
            best = RetentionPolicy(None, metric, order).best(ranked)
            kept |= set() if best is None else {best.number}
        return sorted(record.number for record in ranked[self.num_to_keep :] if record.number not in kept)

    def best(self, records: Iterable[R]) -> R | None:
        """Return the best record; None if no record has the metric."""
        return next((record for record in self._ranked(records) if self._rank(record)[0]), None)

    def can_rank(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with these metrics has the metric, as a number; NaN is one, and the worst."""
        name = self.score_attribute
        return name is None or isinstance(find_metric(metrics, name), numbers.Real)

    def explain_unranked(self, metrics: Mapping[str, Any]) -> str:
        """Return why checkpoints with these metrics cannot be ranked: "has no metric 'acc'; it has loss"."""
        name, names = str(self.score_attribute), flatten(metrics)
        if name in names:
            return f"has {name}={names[name]!r:.50}, which is not a number"
        return f"has no metric {name!r}{nearest(name, names)}; it has {listed(names)}"

    def _ranked(self, records: Iterable[R]) -> list[R]:
        return sorted(records, key=self._rank, reverse=True)

    def _rank(self, record: Record) -> tuple[bool, float, int]:
        """Return what is larger for a better record: whether it has the metric, its score, and its age."""
        value = 0.0 if self.score_attribute is None else metric_value(record.metrics, self.score_attribute)
        if math.isnan(value):
            return False, 0.0, record.number
        return True, value if self.score_order == "max" else -value, record.number


def metric_value(metrics: Mapping[str, Any], name: str) -> float:
    """Return the metric ``name``, ``a/b`` for a nested one; NaN if there is no such number."""
    found = find_metric(metrics, name)
    try:
        return float(found) if isinstance(found, numbers.Real) else math.nan
    except OverflowError:  # an int too large for a float
        return math.inf if found > 0 else -math.inf
