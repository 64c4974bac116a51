"""Metrics by their names. A nested metric is named by the keys that lead to it, as ``val/acc``.

This is the one place that looks a metric up. Where a flat ``"val/acc"`` and a nested one exist, the flat one counts: at each
level the longest key is tried first. A dict of metrics is a group and not a metric.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Keys = tuple[str, ...]

#: Patterns of metrics in the order in which most people look at them; those of ``LAST`` count, and come after all others.
FIRST = ("loss|error|perplex|ppl", "acc|score|f1|reward|auc|bleu|iou", "^lr$|learning_rate")
LAST = "(^|/)(epoch|step)$"
_MAX_NAMES = 10
_MIN_LIKENESS = 0.7


def find_keys(metrics: Mapping[str, Any], name: str) -> Keys | None:
    """Return the keys that lead to the metric ``name``, or None if there is no such metric."""
    if name in metrics and not isinstance(metrics[name], Mapping):
        return (name,)
    end = name.rfind("/")
    while end >= 0:
        group = metrics.get(name[:end])
        if isinstance(group, Mapping) and (keys := find_keys(group, name[end + 1 :])) is not None:
            return (name[:end], *keys)
        end = name.rfind("/", 0, end)
    return None


def find_metric(metrics: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the metric ``name``, or ``default`` if there is no such metric."""
    keys = find_keys(metrics, name)
    return default if keys is None else value_at(metrics, keys)


def value_at(metrics: Mapping[str, Any], keys: Keys) -> Any:
    """Return the metric that these keys lead to."""
    found: Any = metrics
    for key in keys:
        found = found[key]
    return found


def set_at(metrics: dict[str, Any], keys: Keys, value: Any) -> None:
    """Set the metric that these keys lead to. Groups on the way are replaced by copies, or made.

    Where a metric has the name of such a group, the new one gets a flat name.
    """
    group, name = metrics, "/".join(keys)
    for key in keys[:-1]:
        inner = group.get(key, {})
        if not isinstance(inner, Mapping):
            metrics[name] = value
            return
        group[key] = inner = dict(inner)
        group = inner
    group[keys[-1]] = value


def flatten(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the metrics by name: ``{"val": {"acc": 1}}`` becomes ``{"val/acc": 1}``. Lists stay lists."""
    if not any(isinstance(value, Mapping) for value in metrics.values()):
        return {str(key): value for key, value in metrics.items()}
    found: dict[str, Any] = {}
    lengths: dict[str, int] = {}  # of the key at this level that a name begins with
    for key, value in metrics.items():
        length = len(str(key))
        inner = {f"{key}/{name}": leaf for name, leaf in flatten(value).items()} if isinstance(value, Mapping) else None
        for name, leaf in ({str(key): value} if inner is None else inner).items():
            if length >= lengths.get(name, 0):
                found[name], lengths[name] = leaf, length
    return found


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of metrics in the order in which lists and pages show them."""
    return sorted(names, key=_rank)


def _rank(name: str) -> int:
    if re.search(LAST, name):
        return len(FIRST) + 1
    return next((place for place, each in enumerate(FIRST) if re.search(each, name, re.IGNORECASE)), len(FIRST))


def nearest(name: str, names: Collection[str]) -> str:
    """Return ``" (did you mean 'loss'?)"`` for the metric that is most like ``name``, or ``""``."""
    related = [known for known in names if _is_related(name, known)]
    close = difflib.get_close_matches(name, related, n=1, cutoff=0)
    close = close or difflib.get_close_matches(name, list(names), n=1, cutoff=_MIN_LIKENESS)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _is_related(name: str, known: str) -> bool:
    """Return whether one name begins or ends with the other, as val/accuracy with acc, or is that of its group."""
    shorter, longer = sorted((name.rpartition("/")[2], known.rpartition("/")[2]), key=len)
    is_part = bool(shorter) and (longer.startswith(shorter) or longer.endswith(shorter))
    return is_part or known.startswith(f"{name}/")


def listed(names: Iterable[str]) -> str:
    """Return the names for a message, at most ten of them."""
    every = list(names)
    shown = ", ".join(every[:_MAX_NAMES]) or "no metrics"
    return shown if len(every) <= _MAX_NAMES else f"{shown} and {len(every) - _MAX_NAMES} more"
