"""The order of a lazy dataset, whose number of rows is unknown until its last row has come. Pure: no data, no clock.

The rows are cut into *groups* of as many *stretches* of consecutive rows as the order has lanes; all stretches are equally
long. Within a group the order is an `EpochOrder` whose lanes are the stretches. The rows left at the end form a last,
shorter group. The order is therefore known up to the end of the last complete group. It depends on row numbers alone, not
on the blocks in which rows come, since another execution may cut its blocks differently.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.order.epoch_order import EpochOrder, Indices, Shuffle, as_array, sorted_by_lane

#: A stretch is as long as the first block, within these bounds.
MIN_STRETCH_BYTES = 16 * 2**20
MAX_STRETCH_BYTES = 128 * 2**20


class StreamOrder:
    """The order of one epoch of a lazy dataset.

    Args:
        seed: Selects the order, together with ``epoch``.
        epoch: From 0.
        shuffle: ``False``: each stretch in the order of the dataset; ``"window"``: the rows of each stretch mixed.
        lanes: Stretches in a group.
        stretch_rows: Rows in a stretch; 0 if `choose_stretch_rows` is called before anything else.
        serial: From the cursor: how often it was restored, and how often this position was tried again. Part of the pass key.

    Attributes:
        num_rows: Places that are known, up to the end of a group or of the dataset; set by `set_known_rows`.
    """

    def __init__(
        self,
        *,
        seed: int,
        epoch: int,
        shuffle: Shuffle,
        lanes: int = 1,
        stretch_rows: int = 0,
        serial: tuple[int, ...] = (),
    ) -> None:
        self.shuffle = shuffle
        self.lanes = lanes
        self.epoch = epoch
        self.stretch_rows = stretch_rows
        self.serial = serial
        self.num_rows = 0
        self._seed = seed
        self._order_of_group = lru_cache(maxsize=4)(self._make_order_of_group)

    @property
    def group_rows(self) -> int:
        """Rows in a group; the last group may have fewer."""
        return self.lanes * self.stretch_rows

    def choose_stretch_rows(self, block_rows: int, block_bytes: int, global_batch: int) -> None:
        """Choose the length of stretches at the beginning of an epoch: that of the first block, in whole steps, within bounds."""
        if self.stretch_rows:
            return
        per_row = max(1.0, block_bytes / max(1, block_rows))
        rows = max(MIN_STRETCH_BYTES / per_row, min(float(block_rows), MAX_STRETCH_BYTES / per_row), 1.0)
        self.stretch_rows = -(-int(rows) // global_batch) * global_batch

    def set_known_rows(self, num_rows: int, *, is_all: bool) -> None:
        """Record that ``num_rows`` rows have come so far, or that there are no more."""
        self.num_rows = num_rows if is_all else num_rows // self.group_rows * self.group_rows

    def rows(self, places: Indices) -> Indices:
        """Return the rows at these places, all of which are known."""
        if not len(places) or (self.shuffle is False and self.lanes == 1):
            return places
        at = as_array(places)
        groups = at // self.group_rows
        if groups[0] == groups[-1] and (groups == groups[0]).all():
            return self._rows_in_group(int(groups[0]), at)
        found = np.empty_like(at)
        for group in np.unique(groups).tolist():
            here = groups == group
            found[here] = self._rows_in_group(group, at[here])
        return found

    def step(self, start: int, stop: int, first: int, last: int) -> Indices:
        """Sort places ``start`` to ``stop`` by group and lane, and return the ``first`` to the ``last`` of them."""
        found: list[NDArray[np.int64]] = []
        done = 0
        while start < stop:
            base = start // self.group_rows * self.group_rows
            end = min(stop, base + self.group_rows)
            here = range(max(first - done, 0), min(last - done, end - start))
            if len(here):
                places = sorted_by_lane(self.lanes, start - base, end - base, here.start, here.stop)
                found.append(as_array(places) + base)
            done += end - start
            start = end
        return np.concatenate(found) if found else range(0)

    def phase(self, start: int, size: int) -> Any:
        """Return a key: steps of equal size and key have the same places, relative to their start."""
        left = self.group_rows - start % self.group_rows
        return start % self.lanes, left if left < size else 0

    def stretches(self, group: int, lanes: range) -> list[range]:
        """Return the rows of these lanes in a group that is known."""
        size = self._num_rows_in_group(group)
        each, longer = divmod(size, self.lanes)
        base = group * self.group_rows
        starts = [base + lane * each + min(lane, longer) for lane in (*lanes, lanes.stop)]
        return [range(*pair) for pair in pairwise(starts)]

    def _num_rows_in_group(self, group: int) -> int:
        return min(self.group_rows, self.num_rows - group * self.group_rows)

    def _rows_in_group(self, group: int, at: NDArray[np.int64]) -> NDArray[np.int64]:
        base = group * self.group_rows
        return as_array(self._order_of_group(group, self._num_rows_in_group(group)).rows(at - base)) + base

    def _make_order_of_group(self, group: int, size: int) -> EpochOrder:
        return EpochOrder(
            [size],
            seed=self._seed,
            epoch=self.epoch,
            part=group,
            shuffle=self.shuffle,
            window_rows=self.stretch_rows,
            lanes=self.lanes,
        )
