"""The page on the matrix of strategies, which ``make matrix`` writes when all combinations have trained."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

_WIDTH = 125  # of a line of the page


class Deviations:
    """How far the losses and parameters of each combination were from those of the plain loop.

    Args:
        factors: The strategies and their values.
        bounds: The largest relative difference of a loss that is allowed, by precision.
        parameter_bounds: The same for parameters, for the precisions whose parameters are compared.
        num_steps: The steps of each training.
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[Any]],
        bounds: Mapping[str, float],
        parameter_bounds: Mapping[str, float],
        num_steps: int,
    ) -> None:
        self._factors = factors
        self._bounds = bounds
        self._parameter_bounds = parameter_bounds
        self._num_steps = num_steps
        self._found: list[tuple[dict[str, Any], float, float]] = []

    def add(self, combination: dict[str, Any], loss: float, parameter: float) -> None:
        """Record the largest relative differences of a rank."""
        self._found.append((combination, loss, parameter))

    def write(self, path: Path, number: int) -> None:
        """Write the page, if all combinations were recorded."""
        if len({tuple(combination.items()) for combination, _, _ in self._found}) == number:
            path.write_text(self._page(number), encoding="utf-8")

    def _page(self, number: int) -> str:
        return "\n".join(
            [
                "# Matrix of strategies",
                "",
                "<!-- Written by `make matrix`; changes made here are lost. -->",
                "",
                *textwrap.wrap(
                    f"`make matrix` trains a small GPT-2 by SGD with momentum on 4 ranks, with each of the {number} combinations "
                    f"of the values below. After {self._num_steps} steps it compares the losses and all parameters with those of "
                    "the plain loop in one process and in fp32. The difference of a loss is relative to the loss. The difference "
                    "of a parameter is relative to the distance that the plain loop moved it: both are norms over the "
                    "parameter's elements. A combination fails if a difference is larger than allowed.",
                    _WIDTH,
                ),
                "",
                "| precision | loss, allowed | median | largest | parameter, allowed | median | largest |",
                "| --- | --- | --- | --- | --- | --- | --- |",
                *map(self._row_of_precision, self._bounds),
                "",
                "With `bf16-true` the parameters themselves are rounded to bf16, so they are not compared.",
                "",
                *textwrap.wrap(
                    "The next table shows the largest difference of a loss among all combinations with a value. A value of `-` "
                    "means that the strategy is off.",
                    _WIDTH,
                ),
                "",
                f"| strategy | value | {' | '.join(self._bounds)} |",
                "| --- " * (2 + len(self._bounds)) + "|",
                *self._rows_of_values(),
                "",
                f"All combinations passed on {date.today().isoformat()}, on CPUs with gloo.",
                "",
                "```console",
                "$ make matrix",
                "```",
                "",
            ]
        )

    def _row_of_precision(self, precision: str) -> str:
        losses, parameters = zip(
            *(
                (loss, parameter)
                for combination, loss, parameter in self._found
                if combination["precision"] == precision
            ),
            strict=True,
        )
        cells = [f"{self._bounds[precision]:.0e}", f"{statistics.median(losses):.1e}", f"{max(losses):.1e}"]
        if (bound := self._parameter_bounds.get(precision)) is None:
            cells += ["-"] * 3
        else:
            cells += [f"{bound:.0e}", f"{statistics.median(parameters):.1e}", f"{max(parameters):.1e}"]
        return f"| {precision} | {' | '.join(cells)} |"

    def _rows_of_values(self) -> list[str]:
        rows = []
        for name, levels in self._factors.items():
            if name == "precision":
                continue
            for level in levels:
                cells = [f"{self._largest(precision, name, level):.1e}" for precision in self._bounds]
                rows.append(f"| `{name}` | {'-' if level is None else level} | {' | '.join(cells)} |")
        return rows

    def _largest(self, precision: str, name: str, level: Any) -> float:
        return max(
            loss
            for combination, loss, _ in self._found
            if combination["precision"] == precision and combination[name] == level
        )
