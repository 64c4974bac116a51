"""Compare the metrics of two runs, to find where they first differ. Runs anywhere, without Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._util.metric_names import flatten
from raysgd.checkpoint.storage.storage import Storage
from raysgd.result import DATA_WAIT_FRACTION
from raysgd.runs.reading import StoredRun, read_run

#: Metrics that differ between equal runs.
_CLOCK_KEYS = frozenset({"timestamp", "time_this_iter_s", "time_total_s", "attempt", DATA_WAIT_FRACTION})

Span = tuple[int, int] | None
#: Metrics by iteration and rank.
_Rows = dict[tuple[int, int], dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs; it is false if there is none.

    Attributes:
        iteration: The first iteration that differs, or None.
        rank: The lowest rank that differs there, or None.
        metrics: ``{name: (in a, in b)}`` of that rank's metrics that differ there. None stands for a missing metric; all are
            missing if only one run has that rank.
        config: ``{key: (in a, in b)}`` of differing config entries.
        versions: ``{package: (in a, in b)}`` of differing software versions.
        lengths: Iterations in a, in b.
        spans: First and last iteration of a and of b; None if a run has none. A later begin is not a difference, since a
            run may start from a checkpoint. An earlier end is a difference.
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
        spans = f"({_span_text(self.spans[0])} and {_span_text(self.spans[1])})"
        both = _common(*self.spans)
        if both is None:
            return f"no iteration in common {spans}"
        number = both[1] - both[0] + 1
        text = f"equal in the {number} iteration{'s' * (number > 1)} both have ({_span_text(both)})"
        return f"{text}, then one ends {spans}" if self else text


def compare_runs(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, rel_tol: float = 0.0, ignore: tuple[str, ...] = ()
) -> Difference:
    """Compare the metrics of two runs, rank by rank, in the iterations that both have.

    If both runs have logical workers, the number of workers does not matter: only ranks that both runs have are compared.

    Args:
        a: The folder of a run.
        b: The folder of another run.
        rel_tol: Relative difference of numbers that counts as equal. 0: equal bits.
        ignore: Further metrics to leave out, such as ``val/acc``, or ``val`` for all of that group. Times are always left out.

    Raises:
        CheckpointNotFoundError: A folder is not that of a run.
    """
    first, second = read_run(Storage.from_uri(a)), read_run(Storage.from_uri(b))
    rows_a, rows_b = _rows(first, ignore), _rows(second, ignore)
    if first.description.get("logical_workers") and second.description.get("logical_workers"):
        common = rows_a.keys() & rows_b.keys()
        rows_a, rows_b = ({key: row for key, row in rows.items() if key in common} for rows in (rows_a, rows_b))
    iteration, rank, metrics = _first_difference(rows_a, rows_b, rel_tol)
    return Difference(
        iteration,
        rank,
        metrics,
        _differing(first.description.get("config", {}), second.description.get("config", {})),
        _differing(first.description.get("versions", {}), second.description.get("versions", {})),
        (len(first.results), len(second.results)),
        (_span(rows_a), _span(rows_b)),
    )


def _rows(run: StoredRun, ignore: tuple[str, ...]) -> _Rows:
    left_out = _CLOCK_KEYS | set(ignore)
    groups = tuple(f"{name}/" for name in ignore)

    def kept(metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in flatten(metrics).items() if k not in left_out and not k.startswith(groups)}

    return {
        (result["training_iteration"], rank): kept(metrics)
        for result in run.results
        for rank, metrics in zip(result.ranks, result.workers, strict=True)
    }


def _first_difference(
    rows_a: _Rows, rows_b: _Rows, rel_tol: float
) -> tuple[int | None, int | None, dict[str, tuple[Any, Any]]]:
    both = {iteration for iteration, _ in rows_a} & {iteration for iteration, _ in rows_b}
    for key in sorted(key for key in {*rows_a, *rows_b} if key[0] in both):
        if differing := _differing(rows_a.get(key, {}), rows_b.get(key, {}), rel_tol):
            return key[0], key[1], differing
    return None, None, {}


def _span(rows: _Rows) -> Span:
    iterations = [iteration for iteration, _ in rows]
    return (min(iterations), max(iterations)) if iterations else None


def _common(a: Span, b: Span) -> Span:
    if a is None or b is None:
        return None
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return (first, last) if first <= last else None


def _span_text(span: Span) -> str:
    if span is None:
        return "none"
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def _differing(a: dict[str, Any], b: dict[str, Any], rel_tol: float = 0.0) -> dict[str, tuple[Any, Any]]:
    keys = [*a, *(key for key in b if key not in a)]
    return {key: (a.get(key), b.get(key)) for key in keys if not _same(a.get(key), b.get(key), rel_tol)}


def _same(a: Any, b: Any, rel_tol: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=rel_tol)
    return bool(a == b)
