"""Executes a lazy dataset in a process of its own, for all workers that read it.

The executor runs in threads of that process, so that training does not share an interpreter with it. Rows do not pass through
this process: workers learn which blocks exist, and fetch those that they need.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raysgd.data.streams.stream import (
    BlockIndex,
    FirstBlock,
    PassKey,
    PassState,
    ProducedBlock,
    ReaderState,
    StreamLostError,
    execute,
    summarize_error,
)

#: The error of a closed pass. Only a worker whose attempt is ending can see it.
_CLOSED = "a later attempt of the run reads it now"
#: Seconds without a block, while a reader waits, after which `StreamHost.on_long_wait` is called.
WAIT_WARNING_S = 20.0


class StreamHost:
    """Executes a `ray.data.Dataset` for its readers, and answers which blocks exist. Used in one event loop.

    Its methods are those of `raysgd.data.streams.stream.Stream`. They return None where those raise a StreamLostError.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._passes: dict[PassKey, _Pass] = {}
        self._attempt: Any = None
        self._left: set[tuple[PassKey, int]] = set()
        self._first: FirstBlock | None = None
        self._inspected: PassState | None = None

    async def inspect(self, key: PassKey) -> PassState:
        if self._is_stale(key):
            return PassState(error=_CLOSED)
        if self._inspected is None:
            state = await self._wait_for_state(self._pass(key), 1)
            if state.error is not None:
                return state
            self._inspected = replace(state, block_rows=())
        return replace(self._inspected, first=self._first)

    async def wait_for_rows(
        self, key: PassKey, rank: int, needed: int, upto: int, have: ReaderState
    ) -> PassState | None:
        if self._is_stale(key) or (key, rank) in self._left:
            return PassState(error=_CLOSED)
        self._first = self._first or have.first
        if have.execution and key not in self._passes:
            return None
        current = self._pass(key)
        if current.index.is_another(have.execution):
            return None
        if needed < current.index.released_until:
            return PassState(is_released=True)
        current.join(rank, needed)
        return await self._wait_for_state(current, upto, have.num_blocks)

    async def block_refs(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any] | None:
        if key not in self._passes or self._passes[key].index.is_another(execution):
            return None
        try:
            return self._passes[key].index.refs(numbers)
        except StreamLostError:
            return None

    async def leave(self, key: PassKey, rank: int) -> None:
        self._left.add((key, rank))
        if key in self._passes:
            self._passes[key].leave(rank)
            self._close_if_unread(key)

    def on_long_wait(self) -> None:
        """Called when a reader waits and no block has come for `WAIT_WARNING_S`. Does nothing here."""

    async def num_passes(self) -> int:
        """Return the number of passes in progress."""
        return len(self._passes)

    async def _wait_for_state(self, current: _Pass, upto: int, num_known: int = 0) -> PassState:
        """Wait until ``upto`` rows are known, or all there are; return the state for a reader that knows some blocks."""
        current.want(upto)
        while current.index.num_rows < upto and not current.index.is_complete:
            try:
                await asyncio.wait_for(current.news.wait(), WAIT_WARNING_S)
            except asyncio.TimeoutError:
                self.on_long_wait()
        self._first = self._first or current.index.first
        return replace(current.index.state(num_known), first=self._first)

    def _is_stale(self, key: PassKey) -> bool:
        return self._attempt is not None and key[0] < self._attempt

    def _pass(self, key: PassKey) -> _Pass:
        """Return the pass, begun if necessary. Closes passes of earlier attempts and, before a new one, those without readers."""
        if self._attempt is None or key[0] > self._attempt:
            self._attempt = key[0]
            self._left.clear()
            for old in [old for old in self._passes if old[0] < self._attempt]:
                self._passes.pop(old).close()
        if key not in self._passes:
            for other in list(self._passes):
                self._close_if_unread(other)  # begun by `inspect`, but then another pass was read
            self._passes[key] = _Pass(self._dataset)
        return self._passes[key]

    def _close_if_unread(self, key: PassKey) -> None:
        if not self._passes[key].is_read:
            self._passes.pop(key).close()


class _Pass:
    """One execution, in a thread that pauses when its readers need no more rows. Used in the actor's event loop.

    Attributes:
        index: The blocks so far.
        news: Set when a block or the end comes, and then replaced by a new event.
    """

    def __init__(self, dataset: Any) -> None:
        self.index = BlockIndex()
        self._dataset = dataset
        self._needed: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self._wanted = 0
        self._produced = 0
        self._is_closed = False
        self._may_continue = threading.Condition()
        threading.Thread(target=self._run, name="raysgd-stream", daemon=True).start()

    @property
    def is_read(self) -> bool:
        """Whether a rank needs rows of it."""
        return bool(self._needed)

    def join(self, rank: int, needed: int) -> None:
        """Record that this rank needs rows from ``needed`` on."""
        self._needed[rank] = needed
        self._release()

    def want(self, upto: int) -> None:
        """Let the execution continue until ``upto`` rows are known."""
        with self._may_continue:
            self._wanted = max(self._wanted, upto)
            self._may_continue.notify_all()

    def leave(self, rank: int) -> None:
        """Record that this rank needs nothing more."""
        self._needed.pop(rank, None)
        self._release()

    def close(self) -> None:
        """End the execution."""
        with self._may_continue:
            self._is_closed = True
            self._may_continue.notify_all()
        self._on_end(_CLOSED)

    def _release(self) -> None:
        if self._needed:
            self.index.release(min(self._needed.values()))

    def _run(self) -> None:
        """Execute the dataset. Runs in the thread."""
        error: str | None = None
        try:
            for block in execute(self._dataset):
                self._loop.call_soon_threadsafe(self._on_block, block)
                self._produced += block.num_rows
                del block  # else the last block stays referenced while this thread waits
                with self._may_continue:
                    self._may_continue.wait_for(lambda: self._is_closed or self._produced < self._wanted)
                    if self._is_closed:
                        return
        except Exception as failure:
            error = summarize_error(failure)
        self._loop.call_soon_threadsafe(self._on_end, error)

    def _on_block(self, block: ProducedBlock) -> None:
        self.index.add(block)
        self._release()
        self._wake_readers()

    def _on_end(self, error: str | None) -> None:
        if not self.index.is_complete:
            self.index.finish(error)
        self._wake_readers()

    def _wake_readers(self) -> None:
        self.news.set()
        self.news = asyncio.Event()
