"""The ledger: in which order the rows of an epoch come, and which of them each rank takes in each step.

Pure: no data, no clock, no state; tested without Ray. The order is a function of the blocks' row counts, the seed and
the epoch alone. It knows nothing of workers: they take consecutive slices of it, step by step, so that with a fixed
global batch the sequence of global batches is the same for any number of them, and a position in it is one number.

A *row* is an index into the dataset, a *place* an index into the order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysgd.data.mixing import permutation

Shuffle = Literal[False, "window", "full"]
SHUFFLES: tuple[Shuffle, ...] = (False, "window", "full")
#: Indices in the order in which they are wanted; a range, of step 1, where they follow each other: a slice.
Indices: TypeAlias = range | NDArray[np.int64]

#: Rows that are mixed with each other under ``shuffle="window"``.
WINDOW_ROWS = 65_536
#: Places are turned into rows about this many at a time, which spreads NumPy's cost per call over many batches.
LOOKAHEAD_ROWS = 8_192


class EpochOrder:
    """The order of one epoch. Its memory is that of the list of blocks, whatever the number of rows.

    - ``False``: as they come.
    - ``"full"``: any row may come at any place.
    - ``"window"``: the blocks in a random order, and in what they make up together the rows of each window of
      `WINDOW_ROWS` mixed. A worker then needs few blocks at a time.

    Args:
        block_rows: Rows in each block.
        seed: Together with ``epoch`` it chooses the order.
        epoch: From 0.
        shuffle: See above.
        window_rows: Rows in a window.
    """

    def __init__(
        self,
        block_rows: Sequence[int],
        *,
        seed: int,
        epoch: int,
        shuffle: Shuffle = False,
        window_rows: int = WINDOW_ROWS,
    ) -> None:
        self.num_rows = sum(block_rows)
        self.shuffle = shuffle
        self._key = (int(seed), int(epoch))
        self._window_rows = window_rows
        if shuffle == "window" and self.num_rows:
            self._lay_out(np.asarray(block_rows, np.int64))

    def rows(self, places: Indices) -> Indices:
        """The rows at these places."""
        if self.shuffle is False or not len(places):
            return places
        at = np.asarray(places, np.int64)
        if self.shuffle == "full":
            return permutation(self.num_rows, "full", *self._key)(at)
        return self._through_blocks(self._within_windows(at))

    def _lay_out(self, block_rows: NDArray[np.int64]) -> None:
        """Where the blocks begin in the dataset, and in a random order of them."""
        chosen = permutation(len(block_rows), "blocks", *self._key)(np.arange(len(block_rows)))
        ends = np.cumsum(block_rows[chosen])
        starts = ends - block_rows[chosen]
        self._block_ends = ends
        self._to_row = (np.cumsum(block_rows) - block_rows)[chosen] - starts

    def _within_windows(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        windows = places // self._window_rows
        mixed = np.empty_like(places)
        for window in np.unique(windows).tolist():
            here = windows == window
            start = window * self._window_rows
            size = min(self._window_rows, self.num_rows - start)
            mixed[here] = start + permutation(size, "window", *self._key, window)(places[here] - start)
        return mixed

    def _through_blocks(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        blocks = np.searchsorted(self._block_ends, places, side="right")
        moved: NDArray[np.int64] = places + self._to_row[blocks]
        return moved


def layout(block_rows: Sequence[int], shuffle: Shuffle) -> int:
    """A number that tells whether two lists of blocks of equally many rows in all have the same order."""
    return zlib.crc32(repr((WINDOW_ROWS, tuple(block_rows))).encode()) if shuffle == "window" else 0


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Who takes which places. All ranks step together: each step takes the next ``global_batch`` places of the order.

    Rank r takes the r-th of ``world_size`` equal slices of a global batch. The last one may be short: then ranks get
    what there is, in rank order, and the last of them perhaps nothing; with ``drop_last`` it is left out.
    """

    num_rows: int
    global_batch: int
    rank: int
    world_size: int
    drop_last: bool = False

    def has_step(self, start: int) -> bool:
        """Whether a step begins at this place."""
        return start + (self.global_batch if self.drop_last else 1) <= self.num_rows

    def stop(self, start: int) -> int:
        """Where the step that begins at ``start`` ends."""
        return min(start + self.global_batch, self.num_rows)

    def share(self, start: int) -> range:
        """The places of this rank in that step."""
        first = start + self.global_batch * self.rank // self.world_size
        last = start + self.global_batch * (self.rank + 1) // self.world_size
        return range(min(first, self.num_rows), min(last, self.num_rows))

    @property
    def num_steps(self) -> int:
        """Steps in an epoch, on every rank."""
        whole, rest = divmod(self.num_rows, self.global_batch)
        return whole + bool(rest and not self.drop_last)

    def steps(self, order: EpochOrder, start: int) -> Iterator[list[tuple[Indices, int]]]:
        """The steps from ``start`` on, as ``(this rank's rows, where the step ends)``, some thousand rows at a time."""
        at_once = max(1, LOOKAHEAD_ROWS * self.world_size // self.global_batch)
        while self.has_step(start):
            shares: list[range] = []
            stops: list[int] = []
            while self.has_step(start) and len(shares) < at_once:
                shares.append(self.share(start))
                start = self.stop(start)
                stops.append(start)
            yield list(zip(_rows_of(order, shares), stops, strict=True))


def _rows_of(order: EpochOrder, shares: list[range]) -> Sequence[Indices]:
    if order.shuffle is False:
        return shares
    rows = order.rows(np.concatenate([np.arange(share.start, share.stop) for share in shares]))
    ends = np.cumsum([0, *map(len, shares)]).tolist()
    return [rows[first:last] for first, last in pairwise(ends)]
