"""Goes through an epoch of a lazy dataset: which blocks are fetched, held, and let go. Worker side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np

from raysgd.data.columns import Column
from raysgd.data.cursor import StreamCursor
from raysgd.data.ledger import Deal, Indices
from raysgd.data.loading import LoadedBlocks, result_of
from raysgd.data.reader import Follower, Steps
from raysgd.data.stream import Known, StreamLostError
from raysgd.data.stream_joined import Access, Joined, failed
from raysgd.data.stream_order import StreamOrder

#: Blocks that may be on their way.
_MAX_COMING = 8
#: How often in a row an execution may be lost.
MAX_LOSSES = 5


class Owner(Protocol):
    """The reader that a pass belongs to."""

    access: Access
    cursor: StreamCursor

    def turn_to(self, one: StreamPass) -> None:
        """What is read from now on is of this pass."""

    def over(self, one: StreamPass) -> None:
        """A pass has ended."""


class StreamPass(Follower):
    """Goes through what is left of an epoch, and ahead of the loop by a group. Used by the thread that reads.

    Args:
        owner: Whose pass it is.
        joined: The worker's part in it.
        deal: See `Follower`, as of what follows.
        order: Of the epoch.
        start: Where in it.
        stays: It is left open when it is closed: the pass that the next loop begins.

    Attributes:
        joined: What is known of its blocks.
        blocks: Those that are held, of one execution.
        columns: Opened columns of these, by number.
        needed: The first row that is needed.
    """

    def __init__(
        self,
        owner: Owner,
        joined: Joined,
        deal: Deal,
        order: StreamOrder,
        start: int,
        *,
        stays: bool = False,
    ) -> None:
        super().__init__(deal, order, start)
        self.joined = joined
        self.columns: dict[int, dict[str, Column]] = {}
        self.needed = start // order.group_rows * order.group_rows if start else 0
        self._stream_order = order
        self._owner = owner
        self._access = owner.access
        self._stays = stays
        self._group = -1
        self._seen_rows = joined.num_rows
        self._queue: deque[int] = deque()
        self._asker: ThreadPoolExecutor | None = None
        self._answer: Future[Known] | None = None
        self._has_asked = False
        self._holds_of = ""
        self.blocks = LoadedBlocks(lambda number: joined.load("", number))
        self._hold_none()

    def steps(self) -> Steps:
        order, deal, place = self._stream_order, self._deal, self._start
        self._settle()
        while order.stretch_rows:
            self._know(place + deal.global_batch)
            is_all = self.joined.is_all
            known = replace(deal, num_rows=order.num_rows, drop_last=deal.drop_last or not is_all)
            for steps in known.steps(order, place):
                place = steps[-1][1]
                yield steps
            if is_all:
                return

    def first(self) -> Indices | None:
        found = super().first()
        self._owner.turn_to(self)
        return found

    def at(self, place: int) -> None:
        """Let go of what is behind this place, and begin to fetch what is ahead."""
        group = place // self._stream_order.group_rows
        if group != self._group:
            self._enter(group)
        if self._answer is not None and self._answer.done():
            self._take_answer()
        if self._answer is None and not self._has_asked:
            self._ask_ahead()
        while self._queue and self.blocks.num_coming < _MAX_COMING:
            if self.blocks.num_coming and not self.blocks.has_room():
                break
            self.blocks.fetch(self._queue.popleft())
        self._owner.turn_to(self)

    def stop(self) -> None:
        """Whoever waits for rows of it need not any more. Called in any thread."""
        if not self._stays:
            self.joined.is_over = True

    def close(self) -> None:
        """The pass is over."""
        if self._asker is not None:
            self._asker.shutdown(wait=False, cancel_futures=True)
        self.blocks.close()
        self.columns.clear()
        self._owner.over(self)
        if not self._stays:
            self.joined.leave()

    def find_again(self) -> None:
        """Its blocks were lost: the dataset is executed again, up to where it was known. It may come in other blocks."""
        self._forget()
        self._extend(self._seen_rows)

    def _settle(self) -> None:
        order = self._stream_order
        self._extend(max(1, self._start))
        num_rows = self.joined.num_rows
        if num_rows < self._start:
            raise self._owner.cursor.another_dataset(self._owner.cursor.position, f"has {num_rows} rows")
        if self._access.first is not None and num_rows:
            order.settle(*self._access.first, self._deal.global_batch)
            order.know(num_rows, is_all=self.joined.is_all)

    def _know(self, place: int) -> None:
        """Wait until the group in which this place lies is known, or all there is."""
        order = self._stream_order
        upto = -(-place // order.group_rows) * order.group_rows
        while order.num_rows < upto and not self.joined.is_all:
            if self._answer is not None:
                self._take_answer()
            else:
                self._extend(upto)
            order.know(self.joined.num_rows, is_all=self.joined.is_all)

    def _extend(self, upto: int) -> None:
        """Wait until ``upto`` rows are known, and as many as were known before a loss, or all there are."""
        for _ in range(MAX_LOSSES):
            try:
                self._take(self.joined.ask(self.needed, max(upto, self._seen_rows)))
            except StreamLostError:
                self._forget()
            else:
                return
        raise failed(self._access.name, f"it was lost {MAX_LOSSES} times in a row")

    def _take(self, known: Known) -> None:
        self.joined.apply(known)
        self._hold_none_of_another()
        if self.joined.num_rows < self._seen_rows:
            raise failed(
                self._access.name,
                f"it gave {self._seen_rows} rows, and {self.joined.num_rows} when it was executed again after a loss: its "
                "transformations are not deterministic",
            )
        self._seen_rows = self.joined.num_rows

    def _enter(self, group: int) -> None:
        self._group = group
        self.needed = group * self._stream_order.group_rows
        for number in self.blocks.held:
            if self.joined.ends[number] <= self.needed:
                self.blocks.drop(number)
                self.columns.pop(number, None)
        self._queue = deque(self._own_blocks(group))
        self._has_asked = False

    def _ask_ahead(self) -> None:
        """Of the next group; which tells also what is needed no more."""
        self._has_asked = True
        if self._asker is None:
            self._asker = ThreadPoolExecutor(1, thread_name_prefix="raysgd-data")
        upto = (self._group + 2) * self._stream_order.group_rows
        self._answer = self._asker.submit(self.joined.ask, self.needed, upto)

    def _take_answer(self) -> None:
        assert self._answer is not None
        answer, self._answer = self._answer, None
        try:
            self._take(result_of(answer))
        except StreamLostError:
            self.find_again()
        self._stream_order.know(self.joined.num_rows, is_all=self.joined.is_all)
        self._queue.extend(self._own_blocks(self._group + 1))

    def _own_blocks(self, group: int) -> Iterator[int]:
        """Blocks in which this worker's rows of a group lie, by number, if it is known."""
        order, ends = self._stream_order, self.joined.ends
        if group * order.group_rows >= order.num_rows:
            return
        held = set(self.blocks.held)
        for rows in order.stretches(group, self._deal.lanes_of(order.lanes)):
            if rows:
                first, last = np.searchsorted(ends, [rows.start, rows.stop - 1], side="right").tolist()
                yield from (number for number in range(first, last + 1) if number not in held)

    def _forget(self) -> None:
        """What is known, and held, is of an execution that is lost."""
        if self._answer is not None:
            self._answer.cancel()
        self._answer, self._has_asked = None, False
        self._queue.clear()
        self.joined.forget()
        self._hold_none()

    def _hold_none_of_another(self) -> None:
        if self.joined.execution != self._holds_of:
            self._hold_none()

    def _hold_none(self) -> None:
        """Blocks by number mean something within one execution alone."""
        self.blocks.close()
        self.columns.clear()
        joined, execution = self.joined, self.joined.execution
        self._holds_of = execution
        self.blocks = LoadedBlocks(lambda number: joined.load(execution, number))
