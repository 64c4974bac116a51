"""What a measure is: whom it compares, its sizes, and the function that takes its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The two Ray Trains and raysgd.
ALL = ("ray_train", "ray_train_tuned", "raysgd")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of a benchmark.

    Attributes:
        name: As in the results.
        title: As in messages and lists of failures.
        systems: The systems it compares.
        quick_systems: Those of a quick run; None: all.
        units: Its series, with the unit of their samples.
        params: ``params(system, quick)`` returns the sizes, as plain data.
        run: ``run(system, params)`` measures once, in the driver, and returns samples by series.
        is_fresh: Each repetition needs its own processes; other measures share warm ones.
        repeat: Repetitions in a full run.
        timeout_s: Seconds for one repetition.
        environment: Variables of the measuring process.
        partners_of: For systems that are up at the same time and take turns: those with the same answer belong together.
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
