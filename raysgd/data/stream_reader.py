"""Rows of a lazy dataset, from the blocks that its execution has given so far. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

import pyarrow as pa

from raysgd.data.cursor import StreamCursor
from raysgd.data.ledger import Deal, Indices
from raysgd.data.plan import UNKNOWN_ROWS, Source
from raysgd.data.reader import Arrays, TableReader
from raysgd.data.stream import Known, PassKey, StreamGoneError, StreamLostError
from raysgd.data.stream_joined import Access, Joined, failed
from raysgd.data.stream_order import StreamOrder
from raysgd.data.stream_pass import MAX_LOSSES, StreamPass

T = TypeVar("T")


class StreamReader(TableReader):
    """Reads the blocks of the pass that moved last. One for all shares that a worker looks at.

    Args:
        name: The dataset's, for messages.
        source: Of the kind ``stream``.
        cursor: Of this worker's share.
        rank: Of this worker.
        attempt: Greater for each attempt of a run.
    """

    def __init__(self, name: str, source: Source, cursor: StreamCursor, rank: int, attempt: int) -> None:
        super().__init__(name, source, _NoBlocks())
        self.access = Access(name, source.blocks[0], rank)
        self.cursor = cursor
        self._attempt = attempt
        self._looked: Known | None = None
        self._pass: StreamPass | None = None
        self._live: set[StreamPass] = set()
        self._peeked: Joined | None = None
        self._num_peeks = 0

    @property
    def schema(self) -> Any:
        if self._schema is None:
            found = self._look().schema
            self._schema = (self._block_schema() if found is None else found).remove_metadata()
        return self._schema

    @property
    def columns(self) -> list[str]:
        return list(self._look().columns or ())

    def follow(self, deal: Deal, order: Any, start: int) -> StreamPass:
        key = self._key(deal.rank, order, start)
        joined, self._peeked = self._peeked, None
        if joined is not None and joined.key != key:
            joined.leave()
            joined = None
        return self._begin(StreamPass(self, joined or Joined(self.access, key), deal, order, start))

    def peek(self, deal: Deal, order: Any) -> StreamPass:
        """A pass to look at its first rows. The loop that comes next goes on with it, where it begins there too."""
        is_next = deal.rank == self.access.rank and not self.cursor.position.consumed and not self._live
        if is_next:
            joined = self._peeked or Joined(self.access, self._key(deal.rank, order, 0))
            self._peeked = joined
        else:
            self._num_peeks += 1
            joined = Joined(self.access, (*self._key(deal.rank, order, 0), "peek", self.access.rank, self._num_peeks))
        return self._begin(StreamPass(self, joined, deal, order, 0, stays=is_next))

    def close(self) -> None:
        """Let go of the blocks; passes that are under way are over."""
        super().close()
        for one in list(self._live):
            one.close()
        if self._peeked is not None:
            self._peeked.leave()
        self._peeked = self._pass = None
        self._blocks, self._columns = _NoBlocks(), {}

    def arrays(self, rows: Indices, columns: Sequence[str], *, dense: bool = False) -> Arrays:
        return self._again_if_lost(lambda: TableReader.arrays(self, rows, columns, dense=dense))

    def table(self, rows: Indices, columns: Sequence[str]) -> Any:
        return self._again_if_lost(lambda: TableReader.table(self, rows, columns))

    def sample_row(self) -> int:
        assert self._pass is not None
        held = self._pass.blocks.held
        return self._start(held[-1]) if held else self._pass.needed

    def turn_to(self, one: StreamPass) -> None:
        """What is read from now on is of this pass."""
        self._pass = one
        self._blocks, self._columns = one.blocks, one.columns
        self._ends, self._starts = one.joined.ends, one.joined.starts

    def over(self, one: StreamPass) -> None:
        """A pass has ended."""
        self._live.discard(one)

    def _begin(self, one: StreamPass) -> StreamPass:
        self._live.add(one)
        return one

    def _look(self) -> Known:
        if self._looked is None:
            key = self._key(self.access.rank, self.cursor.order(False), self.cursor.position.consumed)
            try:
                known = self.access.stream.look(key)
            except StreamGoneError as error:
                raise failed(self.access.name, str(error)) from error
            if known.error is not None:
                raise failed(self.access.name, known.error)
            self._looked, self.access.first = known, self.access.first or known.first
        return self._looked

    def _block_schema(self) -> Any:
        """Of a Table that is made of blocks that are none."""
        alone = Deal(num_rows=UNKNOWN_ROWS, global_batch=1, rank=0, world_size=1)
        with self.making.lock, closing(self.peek(alone, self.cursor.order(False))) as one:
            rows = one.first()
            return pa.schema([]) if rows is None else self.table(rows, self.columns).schema

    def _key(self, rank: int, order: StreamOrder, start: int) -> PassKey:
        """The pass over the share of ``rank`` from a place on. All workers name that of their own shares alike."""
        label = "" if rank == self.access.rank else f"{rank} for {self.access.rank}"
        return (self._attempt, self.access.name, label, *order.serial, order.epoch, start)

    def _again_if_lost(self, read: Callable[[], T]) -> T:
        for _ in range(MAX_LOSSES):
            try:
                return read()
            except StreamLostError:
                assert self._pass is not None
                self._pass.find_again()
                self.turn_to(self._pass)
        raise failed(self.access.name, f"its blocks were lost {MAX_LOSSES} times in a row")


class _NoBlocks:
    """Of a reader whose first pass has not begun."""

    def get(self, number: int) -> Any:
        raise LookupError(number)

    def close(self) -> None:
        """There is nothing to let go."""
