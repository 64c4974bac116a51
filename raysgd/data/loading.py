"""Blocks that have to be read, and decoded, before their rows can be had: ahead of the loop, and let go behind it.

Worker side. What is ahead is told by the order of the epoch, so nothing is read that is not needed, and nothing twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from raysgd.data.ledger import Deal, EpochOrder
from raysgd.data.reader import Follower

#: How much may be held, with what is loaded ahead of the loop; more where what the loop is in takes more, and a block
#: ahead in any case.
AHEAD_BYTES = 256 * 2**20
#: Blocks that are read at a time: one waits for storage while another is decoded, which Arrow does on all cores.
_LOADERS = 2
#: Blocks that may be on their way.
_MAX_COMING = 8
#: Seconds that the loop waits in one piece: nothing can end a thread that waits for another.
_POLL_S = 0.5

T = TypeVar("T")


def result_of(coming: Future[T]) -> T:
    """What a thread makes; waits for it, where this one can be interrupted."""
    while not wait([coming], timeout=_POLL_S).done:
        pass
    return coming.result()


class LoadedBlocks:
    """The blocks of one reader of one dataset. Used by the thread that reads.

    Args:
        load: Gives a block, a Table; called in threads.

    Attributes:
        num_bytes: Of those that were taken and are held.
        num_taken: How often a block was taken that was not held.
    """

    def __init__(self, load: Callable[[int], Any]) -> None:
        self._load = load
        self._held: dict[int, Any] = {}
        self._coming: dict[int, Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.num_bytes = 0
        self.num_taken = 0

    def get(self, number: int) -> Any:
        """A block; waits for it.

        Raises:
            DataError: It cannot be read.
        """
        if number not in self._held:
            coming = self._coming.pop(number, None)
            block = self._load(number) if coming is None else result_of(coming)
            self._held[number] = block
            self.num_bytes += block.nbytes
            self.num_taken += 1
        return self._held[number]

    @property
    def held(self) -> list[int]:
        """The blocks that were taken and are held, by number."""
        return list(self._held)

    @property
    def num_coming(self) -> int:
        return len(self._coming)

    def has_room(self) -> bool:
        """Whether one more may be loaded ahead; each that is coming, and this, counts as the mean of those that are held."""
        if not self._held:
            return len(self._coming) < _LOADERS
        expected = self.num_bytes / len(self._held) * (len(self._coming) + 1)
        return self.num_bytes + expected <= AHEAD_BYTES

    def fetch(self, number: int) -> None:
        """Begin to load a block, if that is not done."""
        if number in self._held or number in self._coming:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_LOADERS, thread_name_prefix="raysgd-data")
        self._coming[number] = self._pool.submit(self._load, number)

    def drop(self, number: int) -> None:
        """Let go of a block."""
        block = self._held.pop(number, None)
        if block is not None:
            self.num_bytes -= block.nbytes

    def stop(self) -> None:
        """Nothing more is to be loaded ahead; what is held stays."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._coming.clear()

    def close(self) -> None:
        """Let go of everything. It may be used again."""
        self.stop()
        self._held.clear()
        self.num_bytes = 0


class Lookahead(Follower):
    """Goes ahead of one pass through an epoch. Used by the thread that reads.

    Args:
        blocks: What it loads and lets go.
        block_rows: Rows in each of them.
        deal, order, start: Of the pass.
        forget: Told of each block that was let go.
    """

    def __init__(
        self,
        blocks: LoadedBlocks,
        block_rows: Sequence[int],
        deal: Deal,
        order: EpochOrder,
        start: int,
        forget: Callable[[int], None],
    ) -> None:
        super().__init__(deal, order, start)
        self._blocks = blocks
        self._forget = forget
        spans = order.spans(block_rows, deal.lanes_of(order.lanes))
        is_ahead = spans.until > start
        self._coming = zip(spans.blocks[is_ahead].tolist(), spans.until[is_ahead].tolist(), strict=True)
        self._next: tuple[int, int] | None = next(self._coming, None)
        # What is held from the epoch before is let go first where this one does not need it, and else in its turn.
        until = dict(zip(spans.blocks.tolist(), spans.until.tolist(), strict=True))
        self._ends = [(until.get(number, 0), number) for number in {*until, *blocks.held}]
        heapq.heapify(self._ends)
        self._seen_taken = -1

    def at(self, place: int) -> None:
        """Let go of what is behind this place, where room is needed, and begin to load what is ahead."""
        is_all_needed = not self._ends or place < self._ends[0][0]
        if self._next is None or (self._blocks.num_taken == self._seen_taken and is_all_needed):
            return
        self._seen_taken = self._blocks.num_taken
        while self._next is not None and self._blocks.num_coming < _MAX_COMING:
            if not self._has_room(place) and self._blocks.num_coming:
                return
            number, until = self._next
            if until > place:  # else the loop was faster, and has read it by itself
                self._blocks.fetch(number)
            self._next = next(self._coming, None)

    def close(self) -> None:
        """The pass is over."""
        self._blocks.stop()

    def _has_room(self, place: int) -> bool:
        """What is needed no more is kept while there is room: the next epoch will need it."""
        while not self._blocks.has_room() and self._ends and self._ends[0][0] <= place:
            _, number = heapq.heappop(self._ends)
            self._blocks.drop(number)
            self._forget(number)
        return self._blocks.has_room()
