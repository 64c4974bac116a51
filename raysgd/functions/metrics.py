"""Names and values of the metrics of an evaluation, and the best of them. Pure, any process, no JAX.

An evaluation gives ``loss`` and what ``eval_metric_fn`` returns. They are reported as ``eval_loss``, ``eval_rougeL`` and so on,
next to the ``train_loss`` of the epoch.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from raysgd._util.metric_names import find_metric, flatten, listed, nearest
from raysgd._util.text import with_article
from raysgd.config.checks import check_names
from raysgd.errors import ConfigError, MetricError
from raysgd.session.metrics import copy_metrics, read_deferred

PREFIX = "eval_"
TRAIN_LOSS = "train_loss"
#: How often the training step has been compiled in this run; reported with a step for which it was.
COMPILATIONS = "compilations"


def reported_name(name: str) -> str:
    """Return the name under which a metric is reported: ``eval_rougeL`` for ``rougeL``."""
    return name if name == TRAIN_LOSS or name.startswith(PREFIX) else PREFIX + name


def check_metric_names(argument: str, names: Any) -> tuple[str, ...]:
    """Check a list of metrics; None is none.

    Raises:
        ConfigError: It is not a list of names.
    """
    return (
        () if names is None or (isinstance(names, (list, tuple)) and not names) else tuple(check_names(argument, names))
    )


def check_wanted(argument: str, wanted: Iterable[str], metrics: Mapping[str, Any]) -> None:
    """Check that an evaluation gives the metrics that checkpoints are chosen by.

    Args:
        argument: The argument of ``fit`` that names them.
        wanted: As the user wrote them.
        metrics: As they are reported.

    Raises:
        ConfigError: One is missing, or is not a number; the message has the nearest name.
    """
    for name in wanted:
        found = find_metric(metrics, reported_name(name))
        if isinstance(found, numbers.Real):
            continue
        known = [each.removeprefix(PREFIX) for each in flatten(metrics)]
        if found is not None:
            raise ConfigError(
                f"{argument} names {name!r}, which is {found!r:.50}, not a number; name one of {listed(known)}."
            )
        raise ConfigError(
            f"{argument} names {name!r}, which the evaluation does not give{nearest(name, known)}; it gives {listed(known)}."
        )


def as_metrics(returned: Any) -> dict[str, Any]:
    """Return what ``eval_metric_fn`` returned in plain types, as JSON has them.

    Raises:
        ConfigError: It is not a dict of numbers, texts, and small lists and dicts of them.
    """
    if not isinstance(returned, Mapping):
        raise ConfigError(
            f"eval_metric_fn returned {with_article(type(returned).__name__)}; return a dict, such as {{'accuracy': 0.5}}."
        )
    try:
        return {name: read_deferred(value) for name, value in copy_metrics(returned).items()}
    except MetricError as error:
        raise ConfigError(
            f"eval_metric_fn returned {error.key!r}, which is not a metric that JSON can hold: return numbers, texts, and small "
            f"lists and dicts of them ({error})"
        ) from None
