"""The ledger: in which order the rows of an epoch come, and which of them each rank takes in each step.

Pure: no data, no clock, no state; tested without Ray. The order is a function of the blocks' row counts, the seed, the
epoch and the number of lanes alone. It knows nothing of workers: they take consecutive slices of it, step by step, so
that with a fixed global batch the sequence of global batches is the same for any number of them, and a position in it is
one number.

A *row* is an index into the dataset, a *place* an index into the order. A *lane* is a part of the dataset, of consecutive
rows or blocks, that is walked through beside the others: place p is the next row of lane p modulo the number of lanes. A
step has its rows sorted by lane, so that a worker gets those of few lanes, and with a lane for each worker reads a part
of the files that no other reads. One lane is the order of the rows as they come.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysgd.data.mixing import permutation
from raysgd.data.plan import UNKNOWN_ROWS, WINDOW_ROWS

Shuffle = Literal[False, "window", "full"]
SHUFFLES: tuple[Shuffle, ...] = (False, "window", "full")
#: Indices in the order in which they are wanted; a range, of step 1, where they follow each other: a slice.
Indices: TypeAlias = range | NDArray[np.int64]

#: Places are turned into rows about this many at a time, which spreads NumPy's cost per call over many batches.
LOOKAHEAD_ROWS = 8_192
#: Runs of places in one window each that are looked at one by one; where there are more, those of a window are gathered.
_MAX_RUNS = 16


class Order(Protocol):
    """What is asked of an order when its rows are dealt; see `EpochOrder`."""

    shuffle: Shuffle
    lanes: int

    def rows(self, places: Indices) -> Indices: ...

    def step(self, start: int, stop: int, first: int, last: int) -> Indices: ...

    def phase(self, start: int, size: int) -> Any: ...


class BlockSpans(NamedTuple):
    """Blocks in the order in which they are needed.

    Attributes:
        blocks: Their numbers.
        first: The place from which on rows of each may come.
        until: The place from which on none does.
    """

    blocks: NDArray[np.int64]
    first: NDArray[np.int64]
    until: NDArray[np.int64]


class EpochOrder:
    """The order of one epoch. Its memory is that of the list of blocks, whatever the number of rows.

    - ``False``: as they come, in each lane.
    - ``"full"``: any row may come at any place.
    - ``"window"``: the blocks in a random order, and in what they make up together, cut into lanes, the rows of each window
      of ``window_rows`` mixed. A worker then needs few blocks at a time.

    Args:
        block_rows: Rows in each block.
        seed: Together with ``epoch`` it chooses the order.
        epoch: From 0.
        shuffle: See above.
        window_rows: Rows in a window.
        lanes: How many. With ``"full"`` they change nothing: there is one.
        part: Of an order that is made in parts, the number of this one.
    """

    def __init__(
        self,
        block_rows: Sequence[int],
        *,
        seed: int,
        epoch: int,
        shuffle: Shuffle = False,
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
            self._lay_out(np.asarray(block_rows, np.int64))

    def rows(self, places: Indices) -> Indices:
        """The rows at these places."""
        if not len(places) or (self.shuffle is False and self.lanes == 1):
            return places
        at = as_array(places)
        if self.shuffle == "full":
            return permutation(self.num_rows, "full", *self._key)(at)
        lanes: Any = 0
        if self.lanes > 1:
            lanes, at = at % self.lanes, at // self.lanes
        if self.shuffle == "window":
            return self._within_windows(lanes, at)
        return self._lane_starts(lanes) + at

    def step(self, start: int, stop: int, first: int, last: int) -> Indices:
        """Places ``start`` to ``stop`` sorted by lane, and of those the ``first`` to the ``last``."""
        return sorted_by_lane(self.lanes, start, stop, first, last)

    def phase(self, start: int, size: int) -> Any:
        """Steps of one size and phase take places that are equally far from their start."""
        return start % self.lanes

    def spans(self, block_rows: Sequence[int], lanes: range) -> BlockSpans:
        """Where in the order the rows of these lanes lie, block by block.

        Args:
            block_rows: What the order was made of.
            lanes: Whose rows are asked for.
        """
        rows = np.asarray(block_rows, np.int64)
        if self.shuffle == "full" or not self.num_rows:
            full = np.flatnonzero(rows)
            return BlockSpans(full, np.zeros(len(full), np.int64), np.full(len(full), self.num_rows))
        chosen = self._chosen if self.shuffle == "window" else np.arange(len(rows))
        ends = np.cumsum(rows[chosen])
        starts = ends - rows[chosen]
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
            blocks = chosen[here.start : here.stop]
            first[blocks] = np.minimum(first[blocks], begin * self.lanes + lane)
            until[blocks] = np.maximum(until[blocks], last * self.lanes + lane + 1)
        found = np.flatnonzero((until > 0) & (rows > 0))
        found = found[np.argsort(first[found], kind="stable")]
        return BlockSpans(found, first[found], until[found])

    def _lane_starts(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these lanes begin when they are laid end to end; the first ones are a row longer than the last."""
        each, longer = divmod(self.num_rows, self.lanes)
        starts: NDArray[np.int64] = lanes * each + np.minimum(lanes, longer)
        return starts

    def _lay_out(self, block_rows: NDArray[np.int64]) -> None:
        """Where the blocks begin in the dataset, and in a random order of them."""
        chosen = permutation(len(block_rows), "blocks", *self._key)(np.arange(len(block_rows)))
        ends = np.cumsum(block_rows[chosen])
        self._chosen = chosen
        starts = ends - block_rows[chosen]
        self._block_ends = ends
        self._to_row = (np.cumsum(block_rows) - block_rows)[chosen] - starts

    def _within_windows(self, lanes: Any, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at these places of these lanes."""
        keys = at // self._window_rows * self.lanes + lanes
        mixed = np.empty_like(at)
        for here in _alike(keys):
            window, lane = divmod(int(keys[here][0]), self.lanes)
            lane_start, lane_stop = self._lane_starts(np.array([lane, lane + 1])).tolist()
            start = window * self._window_rows
            size = min(self._window_rows, lane_stop - lane_start - start)
            key = (window,) if self.lanes == 1 else (lane, window)
            begin = lane_start + start
            places = permutation(size, "window", *self._key, *key)(at[here] - start)
            mixed[here] = self._through_blocks(places + begin, begin, begin + size)
        return mixed

    def _through_blocks(self, places: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
        """Rows by places in the blocks as they are laid out; ``start`` to ``stop`` is where all of them lie."""
        first, last = np.searchsorted(self._block_ends, [start, stop - 1], side="right").tolist()
        if first == last:
            places += self._to_row[first]
        else:
            places += self._to_row[first + np.searchsorted(self._block_ends[first:last], places, side="right")]
        return places


def _alike(keys: NDArray[np.int64]) -> list[Any]:
    """Where each of the keys stands: slices where equal ones follow each other, or arrays of indices."""
    cuts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    if len(cuts) < _MAX_RUNS:
        return [slice(first, last) for first, last in pairwise([0, *cuts.tolist(), len(keys)])]
    by_key = np.argsort(keys, kind="stable")
    return np.split(by_key, np.flatnonzero(np.diff(keys[by_key])) + 1)


def sorted_by_lane(lanes: int, start: int, stop: int, first: int, last: int) -> Indices:
    """Places ``start`` to ``stop`` sorted by lane, p modulo ``lanes``, and of those the ``first`` to the ``last``."""
    if lanes == 1:
        return range(start + first, start + last)
    skipped = (np.arange(lanes) - start) % lanes  # places before the first one of each lane
    ends = np.cumsum(np.maximum(stop - start - skipped + lanes - 1, 0) // lanes)
    wanted = np.arange(first, last)
    lane = np.searchsorted(ends, wanted, side="right")
    number = wanted - np.concatenate([[0], ends])[lane]
    places: NDArray[np.int64] = start + skipped[lane] + number * lanes
    return places


def layout(block_rows: Sequence[int], shuffle: Shuffle, window_rows: int = WINDOW_ROWS) -> int:
    """A number that tells whether two lists of blocks of equally many rows in all have the same order."""
    return zlib.crc32(repr((window_rows, tuple(block_rows))).encode()) if shuffle == "window" else 0


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Who takes which places. All ranks step together: each step takes the next ``global_batch`` places of the order.

    Rank r takes the r-th of ``world_size`` equal slices of a global batch, whose rows are sorted by lane. The last one may
    be short: then ranks get what there is, in rank order, and the last of them perhaps nothing; with ``drop_last`` it is
    left out.

    Attributes:
        num_rows: Of the order; `UNKNOWN_ROWS` of a stream, for whose parts deals are made as they come.
    """

    num_rows: int
    global_batch: int
    rank: int
    world_size: int
    drop_last: bool = False

    @property
    def is_sized(self) -> bool:
        """Whether it is known how many rows there are."""
        return self.num_rows != UNKNOWN_ROWS

    def may_go_on(self, start: int) -> bool:
        """Whether a step may begin at this place; of a stream that shows when it is asked for."""
        return not self.is_sized or self.has_step(start)

    def has_step(self, start: int) -> bool:
        """Whether a step begins at this place."""
        return start + (self.global_batch if self.drop_last else 1) <= self.num_rows

    def stop(self, start: int) -> int:
        """Where the step that begins at ``start`` ends."""
        return min(start + self.global_batch, self.num_rows)

    def rows(self, order: Order, start: int) -> Indices:
        """The rows of this rank in that step."""
        return self._rows_of(order, [start])[0]

    def lanes_of(self, lanes: int) -> range:
        """The lanes, of so many, whose rows this rank takes; perhaps one more at either end. But for the last, short step."""
        if self.global_batch < lanes:
            return range(lanes)  # a step is of some lanes only, of others each time
        first = self.global_batch * self.rank // self.world_size
        last = self.global_batch * (self.rank + 1) // self.world_size
        each, rest = divmod(self.global_batch, lanes)
        if not rest:
            return range(first // each, -(-last // each))
        return range(
            max(0, first * lanes // self.global_batch - 1), min(lanes, -(-last * lanes // self.global_batch) + 1)
        )

    @property
    def num_steps(self) -> int:
        """Steps in an epoch, on every rank."""
        whole, rest = divmod(self.num_rows, self.global_batch)
        return whole + bool(rest and not self.drop_last)

    def steps(self, order: Order, start: int) -> Iterator[list[tuple[Indices, int]]]:
        """The steps from ``start`` on, as ``(this rank's rows, where the step ends)``, some thousand rows at a time."""
        at_once = max(1, LOOKAHEAD_ROWS * self.world_size // self.global_batch)
        while self.has_step(start):
            starts: list[int] = []
            while self.has_step(start) and len(starts) < at_once:
                starts.append(start)
                start = self.stop(start)
            yield list(zip(self._rows_of(order, starts), [*starts[1:], start], strict=True))

    def _rows_of(self, order: Order, starts: list[int]) -> Sequence[Indices]:
        """The rows of this rank in the steps that begin at these places."""
        shares = self._shares(order, starts)
        if order.shuffle is False and order.lanes == 1:
            return shares
        rows = np.asarray(order.rows(np.concatenate([as_array(share) for share in shares])))
        ends = np.cumsum([0, *map(len, shares)]).tolist()
        parts = [rows[first:last] for first, last in pairwise(ends)]
        return [as_range(part) for part in parts] if order.shuffle is False else parts

    def _shares(self, order: Order, starts: list[int]) -> list[Indices]:
        """The places of this rank in the steps that begin at these places."""
        first = self.global_batch * self.rank // self.world_size
        last = self.global_batch * (self.rank + 1) // self.world_size
        known: dict[tuple[int, int], Any] = {}  # by what a share depends on beside its start
        shares: list[Indices] = []
        for start in starts:
            size = self.stop(start) - start
            if order.lanes == 1:
                shares.append(range(start + min(first, size), start + min(last, size)))
                continue
            key = size, order.phase(start, size)
            if key not in known:
                known[key] = as_array(order.step(start, start + size, min(first, size), min(last, size))) - start
            shares.append(known[key] + start)
        return shares


def as_array(rows: Indices) -> NDArray[np.int64]:
    """The same as an array; NumPy would look at each number of a range."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def as_range(rows: NDArray[np.int64]) -> Indices:
    """A range where ascending rows follow each other."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return range(int(rows[0]), int(rows[-1]) + 1)
    return rows
