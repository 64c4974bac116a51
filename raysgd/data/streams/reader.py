"""Reads a lazy dataset: which blocks of its execution a worker fetches, holds and releases. Worker side.

`StreamReader` belongs to the dataset, `StreamSteps` to one epoch, and `PassMember` is this worker's part in a pass (see
`raysgd.data.streams.stream`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysgd.data.order.cursor import StreamCursor
from raysgd.data.order.epoch_order import Indices
from raysgd.data.order.rank_assignment import RankAssignment
from raysgd.data.order.stream_order import StreamOrder
from raysgd.data.plan import UNKNOWN_ROWS, Source
from raysgd.data.reading.block_cache import MAX_LOADING, BlockCache, wait_for
from raysgd.data.reading.columns import Column
from raysgd.data.reading.readers import Arrays, EpochSteps, Steps, TableReader
from raysgd.data.streams.stream import (
    FirstBlock,
    PassKey,
    PassState,
    ReaderState,
    Stream,
    StreamGoneError,
    StreamLostError,
)
from raysgd.errors import DataError

T = TypeVar("T")

#: How often in a row an execution may be lost.
MAX_LOSSES = 5


@dataclass
class StreamAccess:
    """A worker's access to a lazy dataset.

    Attributes:
        first: The first block that this worker learned of; see `FirstBlock`.
    """

    name: str
    stream: Stream
    rank: int
    first: FirstBlock | None = None

    def error(self, reason: str) -> DataError:
        """Return the error for a dataset that cannot be read."""
        return DataError(f"dataset {self.name!r} could not be executed: {reason}")

    @contextmanager
    def raise_if_gone(self) -> Iterator[None]:
        """Raise a DataError if the executing process is gone."""
        try:
            yield
        except StreamGoneError as error:
            raise self.error(str(error)) from error


class PassMember:
    """This worker's part in a pass, and what it knows of the pass's blocks. Used by one thread at a time.

    Attributes:
        execution: The execution that the known blocks belong to.
        ends, starts: Where blocks end and begin, in rows; int64.
        is_all: Whether there are no more blocks.
        is_over: Whether this worker has left the pass, or is about to.
    """

    def __init__(self, access: StreamAccess, key: PassKey) -> None:
        self.key = key
        self.is_over = False
        self._access = access
        self._shared_key = key
        self.ends: NDArray[np.int64] = np.zeros(0, np.int64)
        self.starts: NDArray[np.int64] = self.ends
        self.is_all, self.execution = False, ""

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def request(self, needed: int, upto: int) -> PassState:
        """Wait until ``upto`` rows are known, or all there are, and return what `apply` takes.

        Args:
            needed: The first row that this worker still needs.
            upto: The number of rows to wait for.

        Raises:
            StreamLostError: What was known no longer holds.
            DataError: The execution failed, or its process is gone.
        """
        have = ReaderState(len(self.ends), self.execution, self._access.first)
        state = self._wait_for_rows(needed, upto, have)
        if state.is_released:  # other ranks are ahead: the dataset is executed for this worker alone
            self._access.stream.leave(self.key, self._access.rank)
            self.key = (*self._shared_key, "alone", self._access.rank)
            if have.num_blocks:
                raise StreamLostError
            state = self._wait_for_rows(needed, upto, have)
        if state.error is not None:
            raise self._access.error(state.error)
        return state

    def apply(self, state: PassState) -> None:
        """Add the blocks that `request` returned."""
        ends = self.num_rows + np.cumsum(state.block_rows, dtype=np.int64)
        self.ends = np.concatenate([self.ends, ends])
        self.starts = np.concatenate([self.starts, ends - np.asarray(state.block_rows, np.int64)])
        self.is_all, self.execution = state.is_all, state.execution
        self._access.first = self._access.first or state.first

    def forget(self) -> None:
        """Drop all that is known of the blocks."""
        self.ends = self.starts = np.zeros(0, np.int64)
        self.is_all, self.execution = False, ""

    def load(self, execution: str, number: int) -> Any:
        """Return a block of an execution, a Table. May be called in another thread.

        Raises:
            StreamLostError: The block is lost.
        """
        stream = self._access.stream
        with self._access.raise_if_gone():
            (ref,) = stream.block_refs(self.key, execution, [number])
            return stream.fetch(ref)

    def leave(self) -> None:
        """Leave the pass."""
        self.is_over = True
        self._access.stream.leave(self.key, self._access.rank)

    def _wait_for_rows(self, needed: int, upto: int, have: ReaderState) -> PassState:
        access = self._access
        if self.is_over:
            return PassState(error="this worker has left the pass")
        with access.raise_if_gone():
            return access.stream.wait_for_rows(self.key, access.rank, needed, upto, have, lambda: self.is_over)


class StreamSteps(EpochSteps):
    """The steps in the rest of an epoch; loads blocks ahead of the loop, by a group. Used by the thread that reads.

    Args:
        assignment, order, start: See `EpochSteps`.
        stays_open: Stay in the pass when these steps are closed, because the next loop begins with it.

    Attributes:
        blocks: The blocks that are held, all of one execution.
        columns: Opened columns of these blocks, by number.
        needed: The first row that is still needed.
    """

    def __init__(
        self,
        reader: StreamReader,
        member: PassMember,
        assignment: RankAssignment,
        order: StreamOrder,
        start: int,
        *,
        stays_open: bool = False,
    ) -> None:
        super().__init__(assignment, order, start)
        self.member = member
        self.columns: dict[int, dict[str, Column]] = {}
        self.needed = start // order.group_rows * order.group_rows if start else 0
        self._stream_order = order
        self._reader = reader
        self._access = reader.access
        self._stays_open = stays_open
        self._group = -1
        self._seen_rows = member.num_rows
        self._queue: deque[int] = deque()
        self._request_pool: ThreadPoolExecutor | None = None
        self._request: Future[PassState] | None = None
        self._has_requested_next = False
        self.blocks = self._make_cache()
        reader.open_steps.add(self)

    def steps(self) -> Steps:
        order, assignment, place = self._stream_order, self._assignment, self._start
        self._begin_order()
        while order.stretch_rows:
            self._wait_for_group_of(place + assignment.global_batch)
            is_all = self.member.is_all
            known = replace(assignment, num_rows=order.num_rows, drop_last=assignment.drop_last or not is_all)
            for steps in known.steps(order, place):
                place = steps[-1][1]
                yield steps
            if is_all:
                return

    def first_rows(self) -> Indices | None:
        found = super().first_rows()
        self._reader.use_blocks_of(self)
        return found

    def advance_to(self, place: int) -> None:
        """Release blocks behind this place, and start to load blocks ahead of it."""
        group = place // self._stream_order.group_rows
        if group != self._group:
            self._enter_group(group)
        if self._request is not None and self._request.done():
            self._apply_request()
        if self._request is None and not self._has_requested_next:
            self._request_next_group()
        while self._queue and self.blocks.num_loading < MAX_LOADING:
            if self.blocks.num_loading and not self.blocks.has_room():
                break
            self.blocks.load_ahead(self._queue.popleft())
        self._reader.use_blocks_of(self)

    def stop(self) -> None:
        if not self._stays_open:
            self.member.is_over = True

    def close(self) -> None:
        if self._request_pool is not None:
            self._request_pool.shutdown(wait=False, cancel_futures=True)
        self.blocks.close()
        self.columns.clear()
        self._reader.open_steps.discard(self)
        if not self._stays_open:
            self.member.leave()

    def recover(self) -> None:
        """After a loss, wait until the dataset is executed again up to where it was known; its blocks may differ."""
        self._forget()
        self._wait_for_rows(self._seen_rows)

    def _begin_order(self) -> None:
        order = self._stream_order
        self._wait_for_rows(max(1, self._start))
        num_rows = self.member.num_rows
        if num_rows < self._start:
            cursor = self._reader.cursor
            raise cursor.other_dataset_error(cursor.position, f"has {num_rows} rows now")
        if self._access.first is not None and num_rows:
            order.choose_stretch_rows(*self._access.first, self._assignment.global_batch)
            order.set_known_rows(num_rows, is_all=self.member.is_all)

    def _wait_for_group_of(self, place: int) -> None:
        """Wait until the group that contains this place is known, or all rows are."""
        order = self._stream_order
        upto = -(-place // order.group_rows) * order.group_rows
        while order.num_rows < upto and not self.member.is_all:
            if self._request is not None:
                self._apply_request()
            else:
                self._wait_for_rows(upto)
            order.set_known_rows(self.member.num_rows, is_all=self.member.is_all)

    def _wait_for_rows(self, upto: int) -> None:
        """Wait until ``upto`` rows are known, and as many as before a loss, or all there are."""
        for _ in range(MAX_LOSSES):
            try:
                self._apply(self.member.request(self.needed, max(upto, self._seen_rows)))
            except StreamLostError:
                self._forget()
            else:
                return
        raise self._access.error(f"it was lost {MAX_LOSSES} times in a row")

    def _apply(self, state: PassState) -> None:
        self.member.apply(state)
        if self.member.execution != self._held_execution:
            self._release_all()
        if self.member.num_rows < self._seen_rows:
            raise self._access.error(
                f"it had {self._seen_rows} rows, but {self.member.num_rows} when it was executed again after a loss: its "
                "transformations are not deterministic",
            )
        self._seen_rows = self.member.num_rows

    def _enter_group(self, group: int) -> None:
        self._group = group
        self.needed = group * self._stream_order.group_rows
        for number in self.blocks.held:
            if self.member.ends[number] <= self.needed:
                self.blocks.release(number)
                self.columns.pop(number, None)
        self._queue = deque(self._blocks_to_load(group))
        self._has_requested_next = False

    def _request_next_group(self) -> None:
        """Request the next group in a thread. The request also says which rows are no longer needed."""
        self._has_requested_next = True
        if self._request_pool is None:
            self._request_pool = ThreadPoolExecutor(1, thread_name_prefix="raysgd-data")
        upto = (self._group + 2) * self._stream_order.group_rows
        self._request = self._request_pool.submit(self.member.request, self.needed, upto)

    def _apply_request(self) -> None:
        assert self._request is not None
        request, self._request = self._request, None
        try:
            self._apply(wait_for(request))
        except StreamLostError:
            self.recover()
        self._stream_order.set_known_rows(self.member.num_rows, is_all=self.member.is_all)
        self._queue.extend(self._blocks_to_load(self._group + 1))

    def _blocks_to_load(self, group: int) -> Iterator[int]:
        """Yield the numbers of the blocks with this worker's rows in a group, if it is known, except blocks that are held."""
        order, ends = self._stream_order, self.member.ends
        if group * order.group_rows >= order.num_rows:
            return
        held = set(self.blocks.held)
        for rows in order.stretches(group, self._assignment.lanes_of_rank(order.lanes)):
            if rows:
                first, last = np.searchsorted(ends, [rows.start, rows.stop - 1], side="right").tolist()
                yield from (number for number in range(first, last + 1) if number not in held)

    def _forget(self) -> None:
        """Drop what is known and held of an execution that is lost."""
        if self._request is not None:
            self._request.cancel()
        self._request, self._has_requested_next = None, False
        self._queue.clear()
        self.member.forget()
        self._release_all()

    def _release_all(self) -> None:
        """Release all blocks: their numbers are valid within one execution only."""
        self.blocks.close()
        self.columns.clear()
        self.blocks = self._make_cache()

    def _make_cache(self) -> BlockCache:
        """Make an empty cache for the blocks of the current execution."""
        member, execution = self.member, self.member.execution
        self._held_execution = execution
        return BlockCache(lambda number: member.load(execution, number))


class StreamReader(TableReader):
    """Reads a lazy dataset, from the blocks of the steps that advanced last. One for all shards that a worker looks at.

    Args:
        cursor: The cursor of this worker's shard.
        rank: Whose shard it reads.
        attempt: Number of the attempt; later attempts have greater ones.
        reader: The worker's world rank.
        is_whole: Whether it reads all rows, as rank 0 of 1.

    Attributes:
        open_steps: The steps that are not closed.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        cursor: StreamCursor,
        rank: int,
        attempt: int,
        reader: int,
        *,
        is_whole: bool = False,
    ) -> None:
        super().__init__(name, source, _NoBlocks())
        self.access = StreamAccess(name, source.blocks[0], reader)
        self._rank = rank
        self._label = "whole" if is_whole else ""
        self.cursor = cursor
        self._attempt = attempt
        self._inspected: PassState | None = None
        self._steps: StreamSteps | None = None
        self.open_steps: set[StreamSteps] = set()
        self._peeked: PassMember | None = None
        self._num_peeks = 0

    @property
    def schema(self) -> Any:
        if self._schema is None:
            found = self._inspect().schema
            self._schema = (self._schema_of_first_row() if found is None else found).remove_metadata()
        return self._schema

    @property
    def columns(self) -> list[str]:
        return list(self._inspect().columns or ())

    def open_epoch(self, assignment: RankAssignment, order: Any, start: int) -> StreamSteps:
        key = self._key(assignment.rank, order, start)
        member, self._peeked = self._peeked, None
        if member is not None and member.key != key:
            member.leave()
            member = None
        return StreamSteps(self, member or PassMember(self.access, key), assignment, order, start)

    def open_peek(self, assignment: RankAssignment, order: Any) -> StreamSteps:
        """Return the steps of an epoch for reading its first rows. The next loop uses the same pass, if it begins there."""
        is_next = assignment.rank == self._rank and not self.cursor.position.consumed and not self.open_steps
        if is_next:
            member = self._peeked or PassMember(self.access, self._key(assignment.rank, order, 0))
            self._peeked = member
        else:
            self._num_peeks += 1
            peek_key = (*self._key(assignment.rank, order, 0), "peek", self.access.rank, self._num_peeks)
            member = PassMember(self.access, peek_key)
        return StreamSteps(self, member, assignment, order, 0, stays_open=is_next)

    def close(self) -> None:
        """Release the blocks, and close the steps in progress."""
        super().close()
        for steps in list(self.open_steps):
            steps.close()
        if self._peeked is not None:
            self._peeked.leave()
        self._peeked = self._steps = None
        self._blocks, self._columns = _NoBlocks(), {}

    def arrays(self, rows: Indices, columns: Sequence[str], *, dense: bool = False) -> Arrays:
        return self._retry_if_lost(lambda: TableReader.arrays(self, rows, columns, dense=dense))

    def table(self, rows: Indices, columns: Sequence[str]) -> Any:
        return self._retry_if_lost(lambda: TableReader.table(self, rows, columns))

    def sample_row(self) -> int:
        assert self._steps is not None
        held = self._steps.blocks.held
        return self._start(held[-1]) if held else self._steps.needed

    def use_blocks_of(self, steps: StreamSteps) -> None:
        """Read from the blocks of these steps from now on."""
        self._steps = steps
        self._blocks, self._columns = steps.blocks, steps.columns
        self._ends, self._starts = steps.member.ends, steps.member.starts

    def _inspect(self) -> PassState:
        if self._inspected is None:
            key = self._key(self._rank, self.cursor.order(False), self.cursor.position.consumed)
            with self.access.raise_if_gone():
                state = self.access.stream.inspect(key)
            if state.error is not None:
                raise self.access.error(state.error)
            self._inspected, self.access.first = state, self.access.first or state.first
        return self._inspected

    def _schema_of_first_row(self) -> Any:
        """Return the schema of a Table of the first row, where blocks are not in Arrow's format."""
        alone = RankAssignment(num_rows=UNKNOWN_ROWS, global_batch=1, rank=0, world_size=1)
        with self.prefetchers.lock, closing(self.open_peek(alone, self.cursor.order(False))) as steps:
            rows = steps.first_rows()
            return pa.schema([]) if rows is None else self.table(rows, self.columns).schema

    def _key(self, rank: int, order: StreamOrder, start: int) -> PassKey:
        """Return the key of the pass over the shard of ``rank`` from a place on.

        All workers share a pass for their own shards, and another one for all rows on each worker.
        """
        label = self._label if rank == self._rank else f"{rank} for {self.access.rank}"
        return (self._attempt, self.access.name, label, *order.serial, order.epoch, start)

    def _retry_if_lost(self, read: Callable[[], T]) -> T:
        for _ in range(MAX_LOSSES):
            try:
                return read()
            except StreamLostError:
                assert self._steps is not None
                self._steps.recover()
                self.use_blocks_of(self._steps)
        raise self.access.error(f"its blocks were lost {MAX_LOSSES} times in a row")


class _NoBlocks:
    """The blocks of a reader before its first epoch."""

    def get(self, number: int) -> Any:
        raise LookupError(number)

    def close(self) -> None:
        """Nothing to release."""
