"""Which rows each rank takes: every step's global batch is cut into one slice per rank.

This module is pure and needs no communication: each worker computes its own slice of the epoch's order. Used on workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from raysgd.data.order.epoch_order import Indices, Shuffle, as_array, as_range
from raysgd.data.plan import UNKNOWN_ROWS

#: Places are turned into rows about this many at a time, which spreads NumPy's cost per call over many batches.
LOOKAHEAD_ROWS = 8_192


class Order(Protocol):
    """The order of an epoch, as `RankAssignment` uses it; see `raysgd.data.order.epoch_order.EpochOrder`."""

    shuffle: Shuffle
    lanes: int

    def rows(self, places: Indices) -> Indices: ...

    def step(self, start: int, stop: int, first: int, last: int) -> Indices: ...

    def phase(self, start: int, size: int) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """Assigns the rows of an epoch to one rank. All ranks step together: each step takes the next ``global_batch`` places.

    The rows of a step are sorted by lane and cut into ``world_size`` slices, equal but for one row; rank r takes slice r.
    The last step may be short: its rows then go to the lowest ranks, and the highest ranks may get none. With ``drop_last``
    a short last step is left out. Where slices belong to logical workers, a process takes several, from ``rank`` on.

    Attributes:
        num_rows: Rows in the order. `UNKNOWN_ROWS` for a lazy dataset, which replaces it part by part as rows become known.
        global_batch: Rows of all ranks in one step.
    """

    num_rows: int
    global_batch: int
    rank: int
    world_size: int
    drop_last: bool = False
    num_slices: int = 1

    @property
    def is_sized(self) -> bool:
        """Whether the number of rows is known."""
        return self.num_rows != UNKNOWN_ROWS

    def may_have_step(self, start: int) -> bool:
        """Whether a step may begin at this place; always True while the number of rows is unknown."""
        return not self.is_sized or self.has_step(start)

    def has_step(self, start: int) -> bool:
        """Whether a step begins at this place."""
        return start + (self.global_batch if self.drop_last else 1) <= self.num_rows

    def step_end(self, start: int) -> int:
        """Return where the step that begins at ``start`` ends."""
        return min(start + self.global_batch, self.num_rows)

    @property
    def num_steps(self) -> int:
        """Steps in an epoch, equal on every rank."""
        whole, remainder = divmod(self.num_rows, self.global_batch)
        return whole + bool(remainder and not self.drop_last)

    def steps(self, order: Order, start: int) -> Iterator[list[tuple[Indices, int]]]:
        """Yield the steps from ``start`` on as lists of ``(rows of this rank, end of the step)``, thousands of rows each."""
        at_once = max(1, LOOKAHEAD_ROWS * self.world_size // self.global_batch)
        while self.has_step(start):
            starts: list[int] = []
            while self.has_step(start) and len(starts) < at_once:
                starts.append(start)
                start = self.step_end(start)
            yield list(zip(self._rows_of_steps(order, starts), [*starts[1:], start], strict=True))

    def lanes_of_rank(self, lanes: int) -> range:
        """Return the lanes, out of ``lanes``, that hold this rank's rows; perhaps one more at either end.

        The short last step may take rows of other lanes.
        """
        if self.global_batch < lanes:
            return range(lanes)  # each step covers only some lanes, and other ones each time
        first, last = self._slice_of_rank()
        each, remainder = divmod(self.global_batch, lanes)
        if not remainder:
            return range(first // each, -(-last // each))
        return range(
            max(0, first * lanes // self.global_batch - 1), min(lanes, -(-last * lanes // self.global_batch) + 1)
        )

    def is_even(self, size: int) -> bool:
        """Whether all slices of a step of ``size`` rows are equally long."""
        return size == self.global_batch and size % self.world_size == 0

    def cut(self, size: int) -> list[range]:
        """Return the slices in a step of ``size`` rows, as ranges of the rows that `steps` yields for it."""
        ends = [
            min(self.global_batch * number // self.world_size, size)
            for number in range(self.rank, self.rank + self.num_slices + 1)
        ]
        return [range(first - ends[0], last - ends[0]) for first, last in pairwise(ends)]

    def _slice_of_rank(self) -> tuple[int, int]:
        """Return where this rank's slice of a full global batch begins and ends."""
        return (
            self.global_batch * self.rank // self.world_size,
            self.global_batch * (self.rank + self.num_slices) // self.world_size,
        )

    def _rows_of_steps(self, order: Order, starts: list[int]) -> Sequence[Indices]:
        """Return this rank's rows in each step that begins at one of these places."""
        places = self._places_of_steps(order, starts)
        if order.shuffle is False and order.lanes == 1:
            return places
        rows = np.asarray(order.rows(np.concatenate([as_array(of_step) for of_step in places])))
        ends = np.cumsum([0, *map(len, places)]).tolist()
        cut = [rows[first:last] for first, last in pairwise(ends)]
        return [as_range(of_step) for of_step in cut] if order.shuffle is False else cut

    def _places_of_steps(self, order: Order, starts: list[int]) -> list[Indices]:
        """Return this rank's places in each step that begins at one of these places."""
        first, last = self._slice_of_rank()
        offsets: dict[tuple[int, Any], Any] = {}  # places relative to the start of their step, by size and phase
        places: list[Indices] = []
        for start in starts:
            size = self.step_end(start) - start
            if order.lanes == 1:
                places.append(range(start + min(first, size), start + min(last, size)))
                continue
            key = size, order.phase(start, size)
            if key not in offsets:
                offsets[key] = as_array(order.step(start, start + size, min(first, size), min(last, size))) - start
            places.append(offsets[key] + start)
        return places
