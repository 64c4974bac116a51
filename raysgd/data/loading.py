"""Blocks that have to be read, and decoded, before their rows can be had: ahead of the loop, and let go behind it.

Worker side. What is ahead is told by the order of the epoch, so nothing is read that is not needed, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.ledger import Deal, EpochOrder, Indices
from raysgd.data.reader import Follower

#: How much may be loaded ahead of the loop, beside what the loop is in; a block more where it is not reached.
AHEAD_BYTES = 256 * 2**20
#: Blocks that are read at a time: one waits for storage while another is decoded, which Arrow does on all cores.
_LOADERS = 2


class LoadedBlocks:
    """The blocks of one reader of one dataset.

    Args:
        load: Gives a block, a Table; called in threads.

    Attributes:
        num_taken: How often a block was taken that had not been before.
    """

    def __init__(self, load: Callable[[int], Any]) -> None:
        self._load = load
        self._loaded: dict[int, Any] = {}
        self._coming: dict[int, Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.num_taken = 0

    def get(self, number: int) -> Any:
        """A block; waits for it.

        Raises:
            DataError: It cannot be read.
        """
        if number not in self._loaded:
            self.num_taken += 1
            coming = self._coming.pop(number, None)
            self._loaded[number] = self._load(number) if coming is None else coming.result()
        return self._loaded[number]

    @property
    def held(self) -> Iterable[int]:
        """The blocks that are here, by number."""
        return self._loaded

    @property
    def is_loading(self) -> bool:
        return bool(self._coming)

    def fetch(self, number: int) -> None:
        """Begin to load a block, if that is not done."""
        if number in self._loaded or number in self._coming:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_LOADERS, thread_name_prefix="raysgd-data")
        self._coming[number] = self._pool.submit(self._load, number)

    def make_room(self, is_needed: Callable[[int], bool]) -> tuple[bool, list[int]]:
        """Whether another block may be loaded ahead, and which of those that are not needed were let go for it.

        A block that is still coming counts as the mean of those that are here. What is not needed is kept while there is
        room: the next epoch will need it.
        """
        sizes = {number: block.nbytes for number, block in self._loaded.items()}
        known = [*sizes.values(), *(each.result().nbytes for each in self._coming.values() if _has_result(each))]
        num_unknown = len(sizes) + len(self._coming) - len(known)
        if not known:
            return num_unknown < _LOADERS, []
        mean = sum(known) / len(known)
        size = sum(known) + mean * (num_unknown + 1)
        gone = []
        for number in list(self._loaded):
            if size <= AHEAD_BYTES:
                break
            if not is_needed(number):
                size -= sizes[number]
                del self._loaded[number]
                gone.append(number)
        return size <= AHEAD_BYTES, gone

    def stop(self) -> None:
        """Nothing more is to be loaded ahead; what is loaded stays."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._coming.clear()

    def close(self) -> None:
        """Let go of everything. It may be used again."""
        self.stop()
        self._loaded.clear()


class Lookahead(Follower):
    """Goes ahead of one pass through an epoch. Used by the thread that reads.

    Args:
        blocks: What it loads and lets go.
        block_rows: Rows in each of them.
        deal, order, start: Of the pass.
        forget: Told which blocks were let go.
    """

    def __init__(
        self,
        blocks: LoadedBlocks,
        block_rows: Sequence[int],
        deal: Deal,
        order: EpochOrder,
        start: int,
        forget: Callable[[list[int]], None],
    ) -> None:
        self._blocks = blocks
        self._ends = np.cumsum(block_rows, dtype=np.int64)
        self._until = order.needed_until(block_rows)
        self._coming = self._block_numbers(deal.steps(order, start))
        self._next: int | None = next(self._coming, None)
        self._forget = forget
        self._num_taken, self._look_again_at = -1, 0

    def at(self, place: int) -> None:
        """Let go of what is behind this place, begin to load what is ahead. Cheap where nothing has changed."""
        if place < self._look_again_at and self._blocks.num_taken == self._num_taken:
            return
        has_room = self._make_room(place)
        while self._next is not None and (has_room or not self._blocks.is_loading):
            self._blocks.fetch(self._next)
            self._next = next(self._coming, None)
            has_room = self._make_room(place)
        self._num_taken = self._blocks.num_taken
        self._look_again_at = min(
            (int(self._until[number]) for number in self._blocks.held if self._until[number] > place), default=0
        )

    def _make_room(self, place: int) -> bool:
        has_room, gone = self._blocks.make_room(lambda number: bool(self._until[number] > place))
        self._forget(gone)
        return has_room

    def close(self) -> None:
        """The pass is over."""
        self._blocks.stop()

    def _block_numbers(self, groups: Iterator[list[tuple[Indices, int]]]) -> Iterator[int]:
        """The blocks that the steps need, in the order in which they first do."""
        seen: set[int] = set()
        for steps in groups:
            for number in self._numbers_in([rows for rows, _ in steps]):
                if number not in seen:
                    seen.add(number)
                    yield number

    def _numbers_in(self, rows: list[Indices]) -> list[int]:
        found: dict[int, None] = {}
        for each in rows:
            if not len(each):
                continue
            if isinstance(each, range):
                first, last = np.searchsorted(self._ends, [each.start, each.stop - 1], side="right").tolist()
                found.update(dict.fromkeys(range(first, last + 1)))
            else:
                found.update(dict.fromkeys(_distinct(np.searchsorted(self._ends, each, side="right"))))
        return list(found)


def _distinct(numbers: NDArray[np.int64]) -> list[int]:
    """Without repetition, in the order in which they come."""
    values, first = np.unique(numbers, return_index=True)
    return [int(value) for value in values[np.argsort(first)]]


def _has_result(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
