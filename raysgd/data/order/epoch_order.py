"""The order in which the rows of an epoch are read: a function of (dataset, seed, epoch), the same on every worker.

This module is pure: no data, no clock, no state. An order depends on the blocks' row counts, the seed, the epoch and the
number of lanes alone; `raysgd.data.order.rank_assignment` cuts it for the ranks. With a fixed global batch the sequence of
global batches is therefore the same for any number of workers, and a position in the order is one number.

Terms: a *row* is an index into the dataset. A *place* is an index into the order. A *lane* is a run of consecutive rows
or blocks of the dataset; lanes are read in parallel: place p is the next row of lane p modulo the number of lanes. With
one lane per worker, each worker reads files that no other worker reads. With one lane and no shuffling, the order is that
of the dataset.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysgd.data.plan import WINDOW_ROWS

Shuffle = Literal[False, "window", "full"]
SHUFFLES: tuple[Shuffle, ...] = (False, "window", "full")
#: Indices in the order in which they are read. Consecutive ascending indices are a range of step 1, read as a slice.
Indices: TypeAlias = range | NDArray[np.int64]

#: Rounds of a permutation. A round mixes small domains less: with 8 rounds all orders of 3 to 6 rows are about equally likely.
_ROUNDS, _ROUNDS_SMALL, _SMALL_BITS = 4, 8, 12
#: Up to this many runs of places in one window are handled one by one; above it, places are sorted by window first.
_MAX_RUNS = 16


class Permutation:
    """A permutation of ``range(size)`` that is computed for the requested places only. Immutable.

    Args:
        size: At least 1.
        key: Selects the permutation; equal keys give equal permutations.
    """

    def __init__(self, size: int, key: tuple[object, ...]) -> None:
        bits = max(2, (size - 1).bit_length())
        word: Any = np.uint16 if bits <= 16 else np.uint32 if bits <= 32 else np.uint64  # narrow words are faster
        mask = (1 << bits) - 1
        self._size, self._word = size, word
        self._mask, self._shift = word(mask), word((bits + 1) // 2)
        constants = _hash_words(key, 2 * (_ROUNDS_SMALL if bits < _SMALL_BITS else _ROUNDS))
        self._rounds = [
            (word(a & mask | 1), word(b & mask)) for a, b in zip(constants[::2], constants[1::2], strict=True)
        ]

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed = self._mix(places.astype(self._word))
        outside = np.flatnonzero(mixed >= self._size)
        # Cycle walking: the mixing permutes a power of two, so values beyond the size are mixed again.
        while len(outside):
            again = self._mix(mixed[outside])
            mixed[outside] = again
            outside = outside[again >= self._size]
        return mixed.astype(np.int64)

    def _mix(self, values: NDArray[Any]) -> NDArray[Any]:
        """Mix the values in place; the arithmetic wraps around, as unsigned integers do."""
        high = np.empty_like(values)
        for factor, summand in self._rounds:
            values *= factor
            values += summand
            values &= self._mask
            np.right_shift(values, self._shift, out=high)
            values ^= high
        return values


@lru_cache(maxsize=64)
def permutation(size: int, *key: object) -> Permutation:
    """Return a cached `Permutation`: neighbouring batches use the same ones."""
    return Permutation(size, key)


def _hash_words(key: tuple[object, ...], count: int) -> list[int]:
    words: list[int] = []
    text = repr(key).encode()
    for part in range(-(-count // 8)):
        digest = hashlib.blake2b(text, digest_size=64, salt=part.to_bytes(16, "little")).digest()
        words += (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8))
    return words[:count]


class BlockSpans(NamedTuple):
    """Blocks, sorted by the place at which they are first needed.

    Attributes:
        blocks: Block numbers.
        first: For each block, the first place that may hold one of its rows.
        until: For each block, the place from which on none of its rows occurs.
    """

    blocks: NDArray[np.int64]
    first: NDArray[np.int64]
    until: NDArray[np.int64]


class EpochOrder:
    """The order of one epoch. Its memory grows with the number of blocks, not with the number of rows.

    - ``shuffle=False``: each lane in the order of the dataset.
    - ``"full"``: any row may come at any place.
    - ``"window"``: the blocks are shuffled, laid end to end and cut into lanes; within a lane the rows of each window of
      ``window_rows`` rows are mixed. A worker then needs few blocks at a time.

    Args:
        block_rows: Rows in each block.
        seed: Selects the order, together with ``epoch``.
        epoch: From 0.
        shuffle: See above.
        window_rows: Rows in a window.
        lanes: Number of lanes. ``"full"`` always has one.
        part: Number of this part, where an order is made in parts (see `raysgd.data.order.stream_order`).
    """

    def __init__(
        self,
        block_rows: Sequence[int],
        *,
        seed: int,
        epoch: int,
        shuffle: Shuffle,
        window_rows: int = WINDOW_ROWS,
        lanes: int = 1,
        part: int | None = None,
    ) -> None:
        self.num_rows = sum(block_rows)
        self.shuffle = shuffle
        self.lanes = 1 if shuffle == "full" else lanes
        self._key = (int(seed), int(epoch), *(() if part is None else (part,)))
        self._window_rows = window_rows
        if shuffle == "window" and self.num_rows:
            self._shuffle_blocks(np.asarray(block_rows, np.int64))

    def rows(self, places: Indices) -> Indices:
        """Return the rows at these places."""
        if not len(places) or (self.shuffle is False and self.lanes == 1):
            return places
        at = as_array(places)
        if self.shuffle == "full":
            return permutation(self.num_rows, "full", *self._key)(at)
        lanes: Any = 0
        if self.lanes > 1:
            lanes, at = at % self.lanes, at // self.lanes
        if self.shuffle == "window":
            return self._rows_within_windows(lanes, at)
        return self._lane_starts(lanes) + at

    def step(self, start: int, stop: int, first: int, last: int) -> Indices:
        """Sort places ``start`` to ``stop`` by lane, and return the ``first`` to the ``last`` of them."""
        return sorted_by_lane(self.lanes, start, stop, first, last)

    def phase(self, start: int, size: int) -> Any:
        """Return a key: steps of equal size and key have the same places, relative to their start."""
        return start % self.lanes

    def spans(self, block_rows: Sequence[int], lanes: range) -> BlockSpans:
        """Return where in the order the rows of these lanes lie, block by block.

        Args:
            block_rows: The row counts that the order was made with.
            lanes: The lanes to look at.
        """
        rows = np.asarray(block_rows, np.int64)
        if self.shuffle == "full" or not self.num_rows:
            full = np.flatnonzero(rows)
            return BlockSpans(full, np.zeros(len(full), np.int64), np.full(len(full), self.num_rows))
        shuffled = self._shuffled if self.shuffle == "window" else np.arange(len(rows))
        ends = np.cumsum(rows[shuffled])
        starts = ends - rows[shuffled]
        first, until = np.full(len(rows), self.num_rows), np.zeros(len(rows), np.int64)
        for lane in lanes:
            lane_start, lane_stop = self._lane_starts(np.array([lane, lane + 1])).tolist()
            here = range(
                int(np.searchsorted(ends, lane_start, "right")), int(np.searchsorted(starts, lane_stop, "left"))
            )
            begin = np.maximum(starts[here.start : here.stop], lane_start) - lane_start
            last = np.minimum(ends[here.start : here.stop], lane_stop) - 1 - lane_start
            if self.shuffle == "window":
                begin = begin // self._window_rows * self._window_rows
                last = np.minimum((last // self._window_rows + 1) * self._window_rows, lane_stop - lane_start) - 1
            blocks = shuffled[here.start : here.stop]
            first[blocks] = np.minimum(first[blocks], begin * self.lanes + lane)
            until[blocks] = np.maximum(until[blocks], last * self.lanes + lane + 1)
        found = np.flatnonzero((until > 0) & (rows > 0))
        found = found[np.argsort(first[found], kind="stable")]
        return BlockSpans(found, first[found], until[found])

    def _lane_starts(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where these lanes begin when all are laid end to end; the first lanes may have one row more than the last."""
        each, longer = divmod(self.num_rows, self.lanes)
        starts: NDArray[np.int64] = lanes * each + np.minimum(lanes, longer)
        return starts

    def _shuffle_blocks(self, block_rows: NDArray[np.int64]) -> None:
        shuffled = permutation(len(block_rows), "blocks", *self._key)(np.arange(len(block_rows)))
        ends = np.cumsum(block_rows[shuffled])
        self._shuffled = shuffled
        self._block_ends = ends
        # What to add to an index into the shuffled blocks, to get the row of the dataset.
        self._to_row = (np.cumsum(block_rows) - block_rows)[shuffled] - (ends - block_rows[shuffled])

    def _rows_within_windows(self, lanes: Any, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows at index ``at`` of each lane."""
        keys = at // self._window_rows * self.lanes + lanes
        mixed = np.empty_like(at)
        for here in _group_equal(keys):
            window, lane = divmod(int(keys[here][0]), self.lanes)
            lane_start, lane_stop = self._lane_starts(np.array([lane, lane + 1])).tolist()
            start = window * self._window_rows
            size = min(self._window_rows, lane_stop - lane_start - start)
            key = (window,) if self.lanes == 1 else (lane, window)
            begin = lane_start + start
            places = permutation(size, "window", *self._key, *key)(at[here] - start)
            mixed[here] = self._rows_of_shuffled(places + begin, begin, begin + size)
        return mixed

    def _rows_of_shuffled(self, indices: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
        """Return rows by their index into the shuffled blocks; all indices lie in ``start`` to ``stop``."""
        first, last = np.searchsorted(self._block_ends, [start, stop - 1], side="right").tolist()
        if first == last:
            indices += self._to_row[first]
        else:
            indices += self._to_row[first + np.searchsorted(self._block_ends[first:last], indices, side="right")]
        return indices


def _group_equal(keys: NDArray[np.int64]) -> list[Any]:
    """Return an index for each distinct key: slices where equal keys follow each other, else arrays of indices."""
    cuts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    if len(cuts) < _MAX_RUNS:
        return [slice(first, last) for first, last in pairwise([0, *cuts.tolist(), len(keys)])]
    by_key = np.argsort(keys, kind="stable")
    return np.split(by_key, np.flatnonzero(np.diff(keys[by_key])) + 1)


def sorted_by_lane(lanes: int, start: int, stop: int, first: int, last: int) -> Indices:
    """Sort places ``start`` to ``stop`` by lane (place modulo ``lanes``), and return the ``first`` to the ``last`` of them."""
    if lanes == 1:
        return range(start + first, start + last)
    skipped = (np.arange(lanes) - start) % lanes  # places before the first one of each lane
    ends = np.cumsum(np.maximum(stop - start - skipped + lanes - 1, 0) // lanes)
    wanted = np.arange(first, last)
    lane = np.searchsorted(ends, wanted, side="right")
    number = wanted - np.concatenate([[0], ends])[lane]
    places: NDArray[np.int64] = start + skipped[lane] + number * lanes
    return places


def layout_checksum(block_rows: Sequence[int], shuffle: Shuffle, window_rows: int = WINDOW_ROWS) -> int:
    """Return a number that is equal for lists of blocks with the same order, given equally many rows in all."""
    return zlib.crc32(repr((window_rows, tuple(block_rows))).encode()) if shuffle == "window" else 0


def as_array(rows: Indices) -> NDArray[np.int64]:
    """Return indices as an array; a range is converted quickly, where NumPy would iterate over its numbers."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def as_range(rows: NDArray[np.int64]) -> Indices:
    """Return ascending indices as a range, if they are consecutive."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return range(int(rows[0]), int(rows[-1]) + 1)
    return rows
