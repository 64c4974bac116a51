"""Where two runs first differ: for hunting what makes a run not repeat. Anywhere; needs no Ray."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from raysgd.trainer.runs import LoadedRun, load_run

#: Metrics that differ between equal runs.
_CLOCK_KEYS = frozenset({"timestamp", "time_this_iter_s", "time_total_s", "attempt"})


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
    """

    iteration: int | None
    rank: int | None
    metrics: dict[str, tuple[Any, Any]]
    config: dict[str, tuple[Any, Any]]
    versions: dict[str, tuple[Any, Any]]
    lengths: tuple[int, int]

    def __bool__(self) -> bool:
        return self.iteration is not None or self.lengths[0] != self.lengths[1]

    def __str__(self) -> str:
        if self.iteration is not None:
            found = ", ".join(f"{name}: {a!r} != {b!r}" for name, (a, b) in self.metrics.items())
            text = f"first difference at iteration {self.iteration}, rank {self.rank}: {found}"
        elif self:
            text = f"equal for {min(self.lengths)} iterations, then one ends ({self.lengths[0]} and {self.lengths[1]})"
        else:
            text = f"equal in all {self.lengths[0]} iterations"
        for what, entries in (("config", self.config), ("versions", self.versions)):
            if entries:
                text += f"; {what}: " + ", ".join(f"{name} {a!r} / {b!r}" for name, (a, b) in entries.items())
        return text


def compare_runs(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, rel_tol: float = 0.0, ignore: tuple[str, ...] = ()
) -> Difference:
    """Compare the metrics of two runs, rank by rank.

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
