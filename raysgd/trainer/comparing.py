"""Where two runs first differ: for hunting what makes a run not repeat. Anywhere; needs no Ray."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from raysgd.result import DATA_WAIT_FRACTION
from raysgd.trainer.runs import LoadedRun, load_run

#: Metrics that differ between equal runs.
_CLOCK_KEYS = frozenset({"timestamp", "time_this_iter_s", "time_total_s", "attempt", DATA_WAIT_FRACTION})

Span = tuple[int, int] | None


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs; false where there is none.

    Attributes:
        iteration: The first iteration that differs, or None.
        rank: The lowest rank that differs there, or None.
        metrics: ``{name: (in a, in b)}`` of that rank's metrics that differ there; None stands for a missing one, as all
            are where only one run has that rank.
        config: ``{key: (in a, in b)}`` of differing config entries.
        versions: The same of software versions.
        lengths: Iterations in a, in b.
        spans: First and last iteration of a, of b; None where a run has none. A run that started from a checkpoint begins
            later, which is no difference; an earlier end is one.
    """

    iteration: int | None
    rank: int | None
    metrics: dict[str, tuple[Any, Any]]
    config: dict[str, tuple[Any, Any]]
    versions: dict[str, tuple[Any, Any]]
    lengths: tuple[int, int]
    spans: tuple[Span, Span]

    def __bool__(self) -> bool:
        ends = [None if span is None else span[1] for span in self.spans]
        return self.iteration is not None or ends[0] != ends[1]

    def __str__(self) -> str:
        if self.iteration is not None:
            found = ", ".join(f"{name}: {a!r} != {b!r}" for name, (a, b) in self.metrics.items())
            text = f"first difference at iteration {self.iteration}, rank {self.rank}: {found}"
        else:
            text = self._equality()
        for what, entries in (("config", self.config), ("versions", self.versions)):
            if entries:
                text += f"; {what}: " + ", ".join(f"{name} {a!r} / {b!r}" for name, (a, b) in entries.items())
        return text

    def _equality(self) -> str:
        if self.spans[0] == self.spans[1]:
            return f"equal in all {self.lengths[0]} iterations"
        told = f"({_told(self.spans[0])} and {_told(self.spans[1])})"
        both = _common(*self.spans)
        if both is None:
            return f"no iteration in common {told}"
        number = both[1] - both[0] + 1
        text = f"equal in the {number} iteration{'s' * (number > 1)} both have ({_told(both)})"
        return f"{text}, then one ends {told}" if self else text


def compare_runs(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, rel_tol: float = 0.0, ignore: tuple[str, ...] = ()
) -> Difference:
    """Compare the metrics of two runs in the iterations that both have, rank by rank.

    Args:
        a: A run's folder.
        b: Another's.
        rel_tol: Relative difference of numbers that counts as none; 0 asks for equal bits.
        ignore: Further metrics to leave out; those that tell the time are left out anyway.

    Raises:
        CheckpointNotFoundError: A folder is no run's.
    """
    first, second = load_run(a), load_run(b)
    rows_a, rows_b = _rows(first, ignore), _rows(second, ignore)
    iteration, rank, metrics = _first_difference(rows_a, rows_b, rel_tol)
    return Difference(
        iteration,
        rank,
        metrics,
        _differing(first.config, second.config, 0.0),
        _differing(first.description.get("versions", {}), second.description.get("versions", {}), 0.0),
        (len(first.metrics), len(second.metrics)),
        (_span(rows_a), _span(rows_b)),
    )


def _rows(run: LoadedRun, ignore: tuple[str, ...]) -> dict[tuple[int, int], dict[str, Any]]:
    left_out = _CLOCK_KEYS | set(ignore)
    return {
        (row["training_iteration"], row["rank"]): {
            str(key): value for key, value in row.items() if key not in left_out and not _is_missing(value)
        }
        for row in run.workers.to_dict("records")
    }


def _first_difference(
    rows_a: dict[tuple[int, int], dict[str, Any]], rows_b: dict[tuple[int, int], dict[str, Any]], rel_tol: float
) -> tuple[int | None, int | None, dict[str, tuple[Any, Any]]]:
    both = {iteration for iteration, _ in rows_a} & {iteration for iteration, _ in rows_b}
    for key in sorted(key for key in {*rows_a, *rows_b} if key[0] in both):
        if differing := _differing(rows_a.get(key, {}), rows_b.get(key, {}), rel_tol):
            return key[0], key[1], differing
    return None, None, {}


def _span(rows: dict[tuple[int, int], dict[str, Any]]) -> Span:
    iterations = [iteration for iteration, _ in rows]
    return (min(iterations), max(iterations)) if iterations else None


def _common(a: Span, b: Span) -> Span:
    if a is None or b is None:
        return None
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return (first, last) if first <= last else None


def _told(span: Span) -> str:
    if span is None:
        return "none"
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def _differing(a: dict[str, Any], b: dict[str, Any], rel_tol: float) -> dict[str, tuple[Any, Any]]:
    keys = [*a, *(key for key in b if key not in a)]
    return {key: (a.get(key), b.get(key)) for key in keys if not _same(a.get(key), b.get(key), rel_tol)}


def _same(a: Any, b: Any, rel_tol: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=rel_tol)
    return bool(a == b)


def _is_missing(value: Any) -> bool:
    """Pandas fills what a row lacks with NaN of its own; a NaN that was reported is lost with it, on both sides alike."""
    return isinstance(value, float) and math.isnan(value)
