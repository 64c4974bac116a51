"""The rows of lists of runs: what they show of a run's state. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from raysgd._util.metric_names import flatten
from raysgd.callbacks.values import as_float, clip, is_number
from raysgd.runs.state import RunState

_MAX_TEXT = 200


def row_of(state: RunState) -> dict[str, Any]:
    """Return what a row shows of a run's state.

    Returns:
        ``run_dir``, ``state``, ``iteration``, ``started``, ``updated``, ``world_size``, ``num_failures``; ``why``: the text of
        its end; ``first``: its iterations before it began; ``source``: the checkpoint that it began with, or empty;
        ``metrics``: the last values, by name; ``config``: values, by name; ``title``, ``tags``, ``notes``: see `Annotations`.
    """
    starts = [event.data for event in state.events if event.kind == "attempt_start"]
    return {
        "run_dir": state.run_dir,
        "state": state.state,
        "why": clip(state.message, _MAX_TEXT),
        "iteration": state.iteration,
        "first": int(starts[0].get("iterations_before", 0)) if starts else 0,
        "source": str((starts[0].get("checkpoint") if starts else None) or ""),
        "started": state.started_s,
        "updated": state.ended_s,
        "world_size": state.world_size,
        "num_failures": state.num_failures,
        "metrics": {name: _value(value) for name, value in state.own_metrics.items()},
        "config": as_values(state.description.get("config", {})),
        **vars(state.annotations),
    }


def as_values(tree: Any) -> dict[str, Any]:
    """Return the leaves of a config by names such as ``optimizer.lr``: numbers, bools and None as they are, others as text."""
    if not isinstance(tree, Mapping):
        return {"": _value(tree)}
    return {name.replace("/", "."): _value(value) for name, value in flatten(tree).items()}


def _value(value: Any) -> Any:
    """Return a value as JSON holds it; a number that is not finite becomes the text that JavaScript has for it."""
    if is_number(value):
        number = as_float(value)
        return number if math.isfinite(number) else json.dumps(number)
    if value is None or isinstance(value, bool):
        return value
    return clip(value if isinstance(value, str) else json.dumps(value, default=str), _MAX_TEXT)
