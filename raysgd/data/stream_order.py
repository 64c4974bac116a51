"""The order of rows of which nobody knows how many there are before the last one has come. Pure: no data, no clock.

The stream is cut into *groups*, each of as many *stretches* of consecutive rows as the order has lanes, all equally long; in
a group the order is an `EpochOrder` whose lanes are its stretches. What is left at the end is a group too, cut into
stretches of what there is. So the order is known up to the end of the last group that is there, and depends on the rows'
numbers alone: not on the blocks in which they come, which may be others when the stream is made again.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.ledger import EpochOrder, Indices, Shuffle, as_array, sorted_by_lane

#: Rows of a stretch are those of a block, within these bounds in bytes.
MIN_STRETCH_BYTES = 16 * 2**20
MAX_STRETCH_BYTES = 128 * 2**20


class StreamOrder:
    """The order of one epoch of a stream.

    Args:
        seed: Together with ``epoch`` it chooses the order.
        epoch: From 0.
        shuffle: ``False``: as they come, in each lane; ``"window"``: the rows of each stretch mixed.
        lanes: Stretches of a group.
        stretch_rows: Rows of a stretch; 0: `settle` says it before anything else is asked.
        serial: Told by the cursor: how often it was put somewhere else, and the same place tried again. Part of what
            identifies a pass.

    Attributes:
        num_rows: Places that are known, to the end of a group or of the stream; said by `know`.
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
        self._group = lru_cache(maxsize=4)(self._make_group)

    @property
    def group_rows(self) -> int:
        """Rows of a group, but for the last."""
        return self.lanes * self.stretch_rows

    def settle(self, block_rows: int, block_bytes: int, global_batch: int) -> None:
        """Choose how long stretches are, where an epoch begins: a first block's rows, whole steps, within bounds.

        Args:
            block_rows: Of the first block.
            block_bytes: Of the first block.
            global_batch: Rows of a step.
        """
        if self.stretch_rows:
            return
        per_row = max(1.0, block_bytes / max(1, block_rows))
        rows = max(MIN_STRETCH_BYTES / per_row, min(float(block_rows), MAX_STRETCH_BYTES / per_row), 1.0)
        self.stretch_rows = -(-int(rows) // global_batch) * global_batch

    def know(self, num_rows: int, *, is_all: bool) -> None:
        """So many rows have come, or there are so many."""
        self.num_rows = num_rows if is_all else num_rows // self.group_rows * self.group_rows

    def rows(self, places: Indices) -> Indices:
        """The rows at these places, all of which are known."""
        if not len(places) or (self.shuffle is False and self.lanes == 1):
            return places
        at = as_array(places)
        groups = at // self.group_rows
        if groups[0] == groups[-1] and (groups == groups[0]).all():
            return self._rows_in(int(groups[0]), at)
        found = np.empty_like(at)
        for group in np.unique(groups).tolist():
            here = groups == group
            found[here] = self._rows_in(group, at[here])
        return found

    def step(self, start: int, stop: int, first: int, last: int) -> Indices:
        """Places ``start`` to ``stop`` sorted by group and lane, and of those the ``first`` to the ``last``."""
        if self.lanes == 1:
            return range(start + first, start + last)
        parts: list[NDArray[np.int64]] = []
        done = 0
        while start < stop:
            base = start // self.group_rows * self.group_rows
            end = min(stop, base + self.group_rows)
            here = range(max(first - done, 0), min(last - done, end - start))
            if len(here):
                places = sorted_by_lane(self.lanes, start - base, end - base, here.start, here.stop)
                parts.append(as_array(places) + base)
            done += end - start
            start = end
        return np.concatenate(parts) if parts else range(0)

    def phase(self, start: int, size: int) -> Any:
        """Steps of one size and phase take places that are equally far from their start."""
        left = self.group_rows - start % self.group_rows
        return start % self.lanes, left if left < size else 0

    def stretches(self, group: int, lanes: range) -> list[range]:
        """The rows of these lanes in a group that is known."""
        size = self._size(group)
        each, longer = divmod(size, self.lanes)
        base = group * self.group_rows
        starts = [base + lane * each + min(lane, longer) for lane in (*lanes, lanes.stop)]
        return [range(*pair) for pair in pairwise(starts)]

    def _size(self, group: int) -> int:
        return min(self.group_rows, self.num_rows - group * self.group_rows)

    def _rows_in(self, group: int, at: NDArray[np.int64]) -> NDArray[np.int64]:
        base = group * self.group_rows
        return as_array(self._group(group, self._size(group)).rows(at - base)) + base

    def _make_group(self, group: int, size: int) -> EpochOrder:
        return EpochOrder(
            [size],
            seed=self._seed,
            epoch=self.epoch,
            part=group,
            shuffle=self.shuffle,
            window_rows=self.stretch_rows,
            lanes=self.lanes,
        )
