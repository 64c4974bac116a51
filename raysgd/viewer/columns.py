"""The metrics of a run as columns of numbers, which a page draws. Pure."""

from __future__ import annotations

import base64
import bisect
import json
import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd.callbacks.values import as_float, clip

#: Texts that are kept of each metric, the newest ones, and their length.
MAX_TEXTS = 500
_MAX_TEXT = 8192
_EXACT_IN_FLOAT32 = 1 << 24
_LARGEST_FLOAT32 = 3e38
_FLOAT32_ROUNDING = 6e-8
_INVISIBLE = 1e-4


class Columns:
    """A row for each iteration, a column for each metric that is a number. Others are texts, of which the newest are kept.

    Args:
        keeps_texts: Keep other metrics than numbers.

    Attributes:
        iterations: The iterations, ascending.
        numbers: The values by metric, in the order of ``iterations``. NaN stands for a missing
            value, infinity for one that is not finite, whichever it is.
        nonfinite: The reported values that are not finite: ``(iteration, "NaN" or "Infinity" or "-Infinity")``, by metric.
        texts: The values of each other metric as text, by iteration: plain text, or what `raysgd._util.media` makes.
    """

    def __init__(self, *, keeps_texts: bool = True) -> None:
        self.iterations = array("q")
        self.numbers: dict[str, array[float]] = {}
        self.nonfinite: dict[str, dict[int, str]] = {}
        self.texts: dict[str, dict[int, str]] = {}
        self._keeps_texts = keeps_texts

    def __len__(self) -> int:
        return len(self.iterations)

    def put(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Set the row of an iteration; a row that is there is replaced."""
        place = self._make_row(iteration)
        numbers = self.numbers
        for name, value in metrics.items():
            if type(value) is float or isinstance(value, (int, float)):
                number = as_float(value)
                if name not in numbers:
                    numbers[name] = array("d", [math.nan]) * len(self.iterations)
                is_finite = math.isfinite(number)
                numbers[name][place] = number if is_finite else math.inf
                if not is_finite:
                    self.nonfinite.setdefault(name, {})[iteration] = json.dumps(number)
            elif value is not None and self._keeps_texts:
                text = value if isinstance(value, str) else json.dumps(value, default=str)
                texts = self.texts.setdefault(name, {})
                texts[iteration] = clip(text, _MAX_TEXT)
                if len(texts) > MAX_TEXTS:
                    del texts[next(iter(texts))]

    def drop_after(self, iteration: int) -> bool:
        """Remove the rows of later iterations; returns whether there were any."""
        place = self.first_place(iteration + 1)
        has_later = place < len(self.iterations)
        del self.iterations[place:]
        for name, column in self.numbers.items():
            del column[place:]
            kept = {at: text for at, text in self.nonfinite.get(name, {}).items() if at <= iteration}
            self.nonfinite[name] = kept
        for name, texts in self.texts.items():
            self.texts[name] = {at: text for at, text in texts.items() if at <= iteration}
        return has_later

    def first_place(self, iteration: int) -> int:
        """Return the place of the first row that belongs to ``iteration`` or a later one."""
        return bisect.bisect_left(self.iterations, iteration)

    def _make_row(self, iteration: int) -> int:
        rows = self.iterations
        if not rows or iteration > rows[-1]:
            rows.append(iteration)
            for column in self.numbers.values():
                column.append(math.nan)
            return len(rows) - 1
        place = self.first_place(iteration)
        if rows[place] == iteration:
            for name, column in self.numbers.items():
                column[place] = math.nan
                self.nonfinite.get(name, {}).pop(iteration, None)
            for texts in self.texts.values():
                texts.pop(iteration, None)
        else:
            rows.insert(place, iteration)
            for column in self.numbers.values():
                column.insert(place, math.nan)
        return place


def encode(values: Any, *, is_time: bool = False) -> dict[str, str]:
    """Return numbers as base64 of little-endian floats, with 4 bytes each where that is exact enough for a curve.

    Args:
        values: The numbers; NaN stands for a missing one, infinity for one that is not finite.
        is_time: They are seconds since the epoch, which need 8 bytes.
    """
    numbers = np.asarray(values, dtype="<f8")
    kind = "f4" if not is_time and _fits_float32(numbers) else "f8"
    return {"type": kind, "data": base64.b64encode(numbers.astype(f"<{kind}").tobytes()).decode("ascii")}


def _fits_float32(numbers: np.ndarray[Any, Any]) -> bool:
    """Return whether rounding to 4 bytes cannot be seen: integers stay exact, others move by less than a pixel."""
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return True
    largest = float(np.abs(finite).max())
    if largest > _LARGEST_FLOAT32:
        return False
    if np.all(finite == np.floor(finite)):
        return largest <= _EXACT_IN_FLOAT32
    spread = float(finite.max() - finite.min())
    return largest * _FLOAT32_ROUNDING < _INVISIBLE * (spread or largest)
