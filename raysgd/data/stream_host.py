"""Executes a lazy dataset in a process of its own, for all workers that read it.

The executor runs in threads of that process, so training shares no interpreter with it. Rows do not pass through: workers
are told which blocks there are, and fetch those that they need.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raysgd.data.lazy import execute
from raysgd.data.stream import BlockIndex, First, Have, Known, PassKey, Produced, StreamLostError, told

#: What a reader is told whose pass was closed: nobody is there to be told, but a worker that is being ended.
_TAKEN_OVER = "another attempt of the run reads it now"
#: Seconds without a block after which it is looked for what the execution waits for.
SAY_S = 20.0


class StreamHost:
    """Executes a dataset for its readers, and tells them which blocks there are. Used in one event loop.

    Args:
        dataset: The `ray.data.Dataset`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._passes: dict[PassKey, _Pass] = {}
        self._attempt: Any = None
        self._left: set[tuple[PassKey, int]] = set()
        self._first: First | None = None
        self._looked: Known | None = None

    async def look(self, key: PassKey) -> Known:
        """As `raysgd.data.stream.Stream.look`."""
        if self._is_stale(key):
            return Known(error=_TAKEN_OVER)
        if self._looked is None:
            one = self._pass(key)
            one.want(1)
            while not one.index.num_rows and not one.index.is_complete:
                await self._wait_for_news(one)
            self._first = self._first or one.index.first
            known = replace(one.index.known(0), block_rows=())
            if known.error is not None:
                return known
            self._looked = known
        return replace(self._looked, first=self._first)

    async def extend(self, key: PassKey, rank: int, needed: int, upto: int, have: Have) -> Known | None:
        """As `raysgd.data.stream.Stream.extend`; None where the execution is another."""
        if self._is_stale(key) or (key, rank) in self._left:
            return Known(error=_TAKEN_OVER)
        self._first = self._first or have.first
        if have.execution and key not in self._passes:
            return None
        one = self._pass(key)
        if one.index.is_another(have.execution):
            return None
        if needed < one.index.gone_until:
            return Known(is_gone=True)
        one.join(rank, needed)
        one.want(upto)
        while one.index.num_rows < upto and not one.index.is_complete:
            await self._wait_for_news(one)
        self._first = self._first or one.index.first
        return replace(one.index.known(have.num_blocks), first=self._first)

    async def blocks(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any] | None:
        """What these blocks are fetched by; None where there are no such."""
        if key not in self._passes or self._passes[key].index.is_another(execution):
            return None
        try:
            return self._passes[key].index.refs(numbers)
        except StreamLostError:
            return None

    async def leave(self, key: PassKey, rank: int) -> None:
        """As `raysgd.data.stream.Stream.leave`."""
        self._left.add((key, rank))
        if key in self._passes:
            self._passes[key].leave(rank)
            self._close_unread(key)

    def waits_long(self) -> None:
        """Nothing has come for `SAY_S`, and somebody waits for it."""

    async def num_passes(self) -> int:
        """How many are under way."""
        return len(self._passes)

    async def _wait_for_news(self, one: _Pass) -> None:
        try:
            await asyncio.wait_for(one.news.wait(), SAY_S)
        except asyncio.TimeoutError:
            self.waits_long()

    def _is_stale(self, key: PassKey) -> bool:
        return self._attempt is not None and key[0] < self._attempt

    def _pass(self, key: PassKey) -> _Pass:
        """The pass, which begins where there is none; those of earlier attempts are over, and those nobody reads."""
        if self._attempt is None or key[0] > self._attempt:
            self._attempt = key[0]
            self._left.clear()
            for old in [old for old in self._passes if old[0] < self._attempt]:
                self._passes.pop(old).close()
        if key not in self._passes:
            for other in list(self._passes):
                self._close_unread(other)  # somebody has looked, and then gone on elsewhere
            self._passes[key] = _Pass(self._dataset)
        return self._passes[key]

    def _close_unread(self, key: PassKey) -> None:
        if not self._passes[key].is_read:
            self._passes.pop(key).close()


class _Pass:
    """One execution, in a thread, as far as its readers ask for. Used in the actor's event loop.

    Attributes:
        news: Is set when a block comes, or the end; after that it is another.
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
        self._go_on = threading.Condition()
        threading.Thread(target=self._run, name="raysgd-stream", daemon=True).start()

    @property
    def is_read(self) -> bool:
        """Whether a rank needs anything of it."""
        return bool(self._needed)

    def join(self, rank: int, needed: int) -> None:
        """This rank needs rows from ``needed`` on."""
        self._needed[rank] = needed
        self._let_go()

    def want(self, upto: int) -> None:
        """Somebody wants to know of so many rows."""
        with self._go_on:
            self._wanted = max(self._wanted, upto)
            self._go_on.notify_all()

    def leave(self, rank: int) -> None:
        """This rank needs nothing more."""
        self._needed.pop(rank, None)
        self._let_go()

    def close(self) -> None:
        """Nobody reads it any more."""
        with self._go_on:
            self._is_closed = True
            self._go_on.notify_all()
        self._finished(_TAKEN_OVER)

    def _let_go(self) -> None:
        if self._needed:
            self.index.release(min(self._needed.values()))

    def _run(self) -> None:
        """In the thread."""
        error: str | None = None
        try:
            for block in execute(self._dataset):
                self._tell(self._came, block)
                self._produced += block.num_rows
                del block  # else the last one is held while this waits
                with self._go_on:
                    self._go_on.wait_for(lambda: self._is_closed or self._produced < self._wanted)
                    if self._is_closed:
                        return
        except Exception as failure:
            error = told(failure)
        self._tell(self._finished, error)

    def _tell(self, method: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(method, *args)

    def _came(self, block: Produced) -> None:
        self.index.add(block)
        self._let_go()
        self._wake()

    def _finished(self, error: str | None) -> None:
        if not self.index.is_complete:
            self.index.finish(error)
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()
