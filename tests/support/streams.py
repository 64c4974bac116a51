"""Lazy datasets without Ray: doubles of a `ray.data.Dataset`, its blocks, and the process that executes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from raysgd.data.streams.host import StreamHost
from raysgd.data.streams.stream import PassKey, PassState, ReaderState, StreamLostError


class LazyRows:
    """A lazy dataset of numbered rows. ``cuts`` returns the block sizes of each execution.

    Attributes:
        num_made: Blocks made in all executions.
        num_executions: How often the dataset was executed.
        num_closed: How many executions have ended.
    """

    def __init__(self, cuts: Callable[[int], Iterable[int]], fails_at: int | None = None) -> None:
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))
        self.num_made = 0
        self.num_executions = 0
        self.num_closed = 0
        self._cuts = cuts
        self._fails_at = fails_at

    def iter_internal_ref_bundles(self) -> Iterator[Any]:
        assert self.context.execution_options.preserve_order
        execution, self.num_executions = self.num_executions, self.num_executions + 1
        start = 0
        try:
            for count in self._cuts(execution):
                if self._fails_at is not None and start + count > self._fails_at:
                    raise ValueError(f"row {self._fails_at} is bad")
                table = pa.table({"x": range(start, start + count)}, schema=pa.schema([("x", pa.int64())]))
                self.num_made += 1
                yield bundle(table)
                start += count
        finally:
            self.num_closed += 1


def bundle(table: Any) -> Any:
    """Return a block in the form in which Ray Data yields it."""
    metadata = SimpleNamespace(num_rows=table.num_rows, size_bytes=table.nbytes)
    return SimpleNamespace(schema=table.schema, blocks=[SimpleNamespace(ref=table, metadata=metadata)], slices=(None,))


class HostInThread:
    """A `Stream` whose host runs in an event loop in a thread, as in an actor. ``restart`` loses the host's state."""

    def __init__(self, dataset: Any, make_host: Callable[[Any], StreamHost] = StreamHost) -> None:
        self.dataset = dataset
        self._make_host = make_host
        self.host = make_host(dataset)
        self.num_requests = 0
        self._generation = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        self._in_loop(self._replace_host)

    def inspect(self, key: PassKey) -> PassState:
        while (state := self._ask("inspect", key)) is None:
            pass
        return state  # type: ignore[no-any-return]

    def wait_for_rows(
        self, key: PassKey, rank: int, needed: int, upto: int, have: ReaderState, is_over: Callable[[], bool]
    ) -> PassState:
        self.num_requests += 1
        return _not_lost(self._ask("wait_for_rows", key, rank, needed, upto, have))  # type: ignore[no-any-return]

    def block_refs(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        return _not_lost(self._ask("block_refs", key, execution, numbers))  # type: ignore[no-any-return]

    def fetch(self, ref: Any) -> Any:
        return ref[0]

    def leave(self, key: PassKey, rank: int) -> None:
        self._ask("leave", key, rank)

    def num_held(self) -> int:
        """Return the number of blocks that the host keeps references to."""
        return sum(len(each.index._refs) for each in self.host._passes.values())

    def num_passes(self) -> int:
        return self._ask("num_passes")  # type: ignore[no-any-return]

    def close(self) -> None:
        self._in_loop(self._end_passes)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _replace_host(self) -> None:
        self._end_passes()
        self._generation += 1
        self.host = self._make_host(self.dataset)

    def _end_passes(self) -> None:
        for each in self.host._passes.values():
            each.close()

    def _in_loop(self, change: Callable[[], None]) -> None:
        async def make() -> None:
            change()

        asyncio.run_coroutine_threadsafe(make(), self.loop).result(30)

    def _ask(self, method: str, *args: Any) -> Any:
        async def ask() -> Any:
            generation = self._generation
            answer = await getattr(self.host, method)(*args)
            return answer if generation == self._generation else None

        return asyncio.run_coroutine_threadsafe(ask(), self.loop).result(30)


@contextmanager
def hosted(dataset: Any, make_host: Callable[[Any], StreamHost] = StreamHost) -> Iterator[HostInThread]:
    host = HostInThread(dataset, make_host)
    try:
        yield host
    finally:
        host.close()


def _not_lost(answer: Any) -> Any:
    if answer is None:
        raise StreamLostError
    return answer
