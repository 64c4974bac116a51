"""The description of a measure: the systems it compares, its sizes, and the function that takes its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Both variants of Ray Train, and raysgd.
ALL = ("ray_train", "ray_train_tuned", "raysgd")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of a benchmark.

    Attributes:
        name: The name in the results.
        title: The name in messages and lists of failures.
        systems: The systems that it compares.
        quick_systems: The systems of a quick run; None: all.
        units: The unit of each series.
        params: ``params(system, quick)`` returns the sizes, as plain data.
        run: ``run(system, params)`` measures once, in the driver, and returns samples by series.
        is_fresh: Each repetition needs its own processes; other measures share warm ones.
        repeat: Repetitions in a full run.
        timeout_s: Seconds for one repetition.
        environment: Environment variables of the measuring process.
        partners_of: Systems for which it returns the same value run at the same time and take turns; None: each runs alone.
    """

    name: str
    title: str
    systems: Sequence[str]
    units: Mapping[str, str]
    params: Callable[[str, bool], dict[str, Any]]
    run: Callable[[Any, dict[str, Any]], dict[str, list[float]]]
    quick_systems: Sequence[str] | None = None
    is_fresh: bool = True
    repeat: int = 1
    timeout_s: float = 150.0
    environment: Mapping[str, str] = field(default_factory=dict)
    partners_of: Callable[[str], str] | None = None

    def systems_of(self, *, quick: bool) -> Sequence[str]:
        """Return the systems of a full or a quick run."""
        return self.quick_systems if quick and self.quick_systems is not None else self.systems
