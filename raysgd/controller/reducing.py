"""One dict of metrics out of those of all ranks. Pure; used by the readers of a run and for the scores of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.errors import ConfigError

Reduce = Mapping[str, str]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": _mean,
    "sum": lambda values: math.fsum(values) if any(isinstance(v, float) for v in values) else sum(values),
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
}


def check_reduce(reduce: Any) -> dict[str, str]:
    """``reduce`` as given by the user.

    Raises:
        ConfigError: It is no dict of known reductions.
    """
    if reduce is None:
        return {}
    if not isinstance(reduce, Mapping):
        raise ConfigError(f"reduce={reduce!r} is no dict; give {{'loss': 'mean', ...}} with {', '.join(REDUCTIONS)}.")
    for key, name in reduce.items():
        if not isinstance(name, str) or name not in REDUCTIONS:
            raise ConfigError(f"reduce[{key!r}]={name!r} is not known; give one of {', '.join(REDUCTIONS)}.")
    return dict(reduce)


def reduce_metrics(workers: Sequence[Mapping[str, Any]], reduce: Reduce) -> dict[str, Any]:
    """The metrics of the lowest rank, with those named in ``reduce`` made of all ranks that reported them.

    Args:
        workers: Each rank's metrics, in rank order.
        reduce: Reduction by metric. ``mean``, ``sum``, ``min`` and ``max`` pass over values that are no numbers.
    """
    merged = dict(workers[0])
    for key, name in reduce.items():
        values = [metrics[key] for metrics in workers if key in metrics]
        if name not in ("last", "first"):
            values = [value for value in values if isinstance(value, (int, float))]
        if values:
            merged[key] = _reduced(name, values)
    return merged


def _reduced(name: str, values: Sequence[Any]) -> Any:
    if name in ("min", "max") and any(value != value for value in values):
        return math.nan  # min and max of a list with NaN depend on its order
    return REDUCTIONS[name](values)
