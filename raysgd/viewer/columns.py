"""The metrics of a run as columns of numbers, which a page draws. Pure."""

from __future__ import annotations

import base64
import bisect
import itertools
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raysgd.callbacks.values import as_float, clip

#: Rows that are kept as they are. Where there are more, older ones are summarised.
MAX_ROWS = 100_000
#: Texts that are kept of each metric, the newest ones, and their length.
MAX_TEXTS = 500
_MAX_TEXT = 8192
_EXACT_IN_FLOAT32 = 1 << 24
_LARGEST_FLOAT32 = 3e38
_FLOAT32_ROUNDING = 6e-8
_INVISIBLE = 1e-4


class Columns:
    """A row for each iteration, a column for each metric that is a number. Others are texts, of which the newest are kept.

    Where there are too many rows, older ones are summarised: two rows stand for each stretch of ``step`` iterations, and have
    the lowest and the highest value of each metric, in their order. All stretches are equally long.

    Args:
        keeps_texts: Keep other metrics than numbers.
        left_out: Metrics that get no column.
        max_rows: Rows that are kept, a multiple of 4.

    Attributes:
        iterations: The iterations, ascending.
        numbers: The values by metric, in the order of ``iterations``. NaN stands for a missing
            value, infinity for one that is not finite, whichever it is.
        nonfinite: The reported values that are not finite: ``(iteration, "NaN" or "Infinity" or "-Infinity")``, by metric.
        step: The iterations that two rows of a summary stand for; 1 without one.
        texts: The values of each other metric as text, by iteration: plain text, or what `raysgd._util.media` makes.
    """

    def __init__(
        self, *, keeps_texts: bool = True, left_out: frozenset[str] = frozenset(), max_rows: int = MAX_ROWS
    ) -> None:
        self.iterations = array("q")
        self.numbers: dict[str, array[float]] = {}
        self.nonfinite: dict[str, dict[int, str]] = {}
        self.texts: dict[str, dict[int, str]] = {}
        self.step = 1
        self._left_out = left_out
        self._max_rows = max_rows
        self._num_summaries = 0  # rows at the begin that stand for stretches
        self._keeps_texts = keeps_texts

    def __len__(self) -> int:
        return len(self.iterations)

    def put(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Set the row of an iteration; a row that is there is replaced.

        One that is summarised is removed with all later ones: they are repeated, too.
        """
        if self._num_summaries and iteration < self.iterations[self._num_summaries - 2] + self.step:
            self.drop_after(iteration - 1)
        place = self._make_row(iteration)
        for name, value in metrics.items():
            self._set(name, place, iteration, value)

    def merge(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Set these metrics of an iteration; the others of its row stay."""
        place = self.first_place(iteration)
        if place < self._num_summaries and self.iterations[place] != iteration:
            place = max(0, place - 1)  # the row of its stretch
        elif place == len(self.iterations) or self.iterations[place] != iteration:
            self.put(iteration, metrics)
            return
        for name, value in metrics.items():
            self._set(name, place, iteration, value)

    def put_all(self, iterations: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> bool:
        """Set the rows of ascending iterations; return whether rows were summarised since."""
        names, before = list(rows[0]), len(self.iterations)
        is_new = not before or iterations[0] > self.iterations[-1]
        if len(rows) > 1 and is_new and all(list(row) == names for row in rows):
            self.iterations.extend(iterations)
            for name, values in zip(names, zip(*(row.values() for row in rows), strict=True), strict=True):
                self._extend(name, before, iterations, values)
            for column in self.numbers.values():
                column.extend(itertools.repeat(math.nan, len(self.iterations) - len(column)))
        else:
            for iteration, row in zip(iterations, rows, strict=True):
                self.put(iteration, row)
        if len(self.iterations) <= self._max_rows:
            return False
        self._summarise()
        return True

    def _extend(self, name: str, before: int, iterations: Sequence[int], values: Sequence[Any]) -> None:
        """Add the values of new rows to a column that has those ``before`` them."""
        if name in self._left_out:
            return
        try:
            new = array("d", values)
        except (TypeError, OverflowError):  # texts, missing values, or large integers
            new = None
        if new is None or not np.isfinite(np.frombuffer(new)).all():
            if name in self.numbers:
                self.numbers[name].extend(itertools.repeat(math.nan, len(values)))
            for place, (iteration, value) in enumerate(zip(iterations, values, strict=True), before):
                self._set(name, place, iteration, value)
            return
        if name not in self.numbers:
            self.numbers[name] = array("d", [math.nan]) * before
        self.numbers[name].extend(new)

    def _set(self, name: str, place: int, iteration: int, value: Any) -> None:
        if name in self._left_out:
            return
        if type(value) is float or isinstance(value, (int, float)):
            number = as_float(value)
            if name not in self.numbers:
                self.numbers[name] = array("d", [math.nan]) * len(self.iterations)
            is_finite = math.isfinite(number)
            self.numbers[name][place] = number if is_finite else math.inf
            if not is_finite:
                self.nonfinite.setdefault(name, {})[iteration] = json.dumps(number)
        elif value is not None and self._keeps_texts:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            texts = self.texts.setdefault(name, {})
            texts[iteration] = clip(text, _MAX_TEXT)
            if len(texts) > MAX_TEXTS:
                del texts[next(iter(texts))]

    def _summarise(self) -> None:
        """Summarise the rows that are not, and make stretches longer until half of the rows are free."""
        self._reduce(self._num_summaries, len(self.iterations), 4 if self.step == 1 else self.step)
        self.step = max(4, self.step)
        while self._num_summaries > self._max_rows // 2:
            self._reduce(0, self._num_summaries, 4)
            self.step *= 2

    def _reduce(self, begin: int, end: int, size: int) -> None:
        """Replace each ``size`` rows between two places by two; those that are left over at the end stay as they are."""
        end -= (end - begin) % size
        for name, column in self.numbers.items():
            self.numbers[name] = column[:begin] + array("d", _extremes(column[begin:end], size)) + column[end:]
        kept = np.asarray(self.iterations[begin:end]).reshape(-1, size)[:, [0, size // 2]].ravel()
        self.iterations = self.iterations[:begin] + array("q", kept.tolist()) + self.iterations[end:]
        self._num_summaries = begin + len(kept)

    def drop_after(self, iteration: int) -> bool:
        """Remove the rows of later iterations; returns whether there were any."""
        place = self.first_place(iteration + 1)
        if place < self._num_summaries:
            place -= place % 2
            self._num_summaries = place
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


def _extremes(values: Any, size: int) -> list[float]:
    """Return the lowest and the highest finite value of each ``size`` values, in their order; of none, the first value."""
    groups = np.asarray(values).reshape(-1, size)
    is_finite = np.isfinite(groups)
    low = np.where(is_finite, groups, np.inf).argmin(axis=1)
    high = np.where(is_finite, groups, -np.inf).argmax(axis=1)
    places = np.sort(np.stack([low, high], axis=1), axis=1)
    extremes: list[float] = np.take_along_axis(groups, places, axis=1).ravel().tolist()
    return extremes


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
