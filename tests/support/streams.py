"""Lazy datasets without Ray: what stands for a `ray.data.Dataset`, its blocks, and the process that executes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from raysgd.data.stream import Have, Known, PassKey, StreamLostError
from raysgd.data.stream_host import StreamHost


class LazyRows:
    """Numbered rows, made as they are asked for. ``cuts`` says of each execution in which blocks they come.

    Attributes:
        num_made: Blocks made in all executions.
        num_executions: How often it was executed.
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
    """What Ray gives of a block."""
    metadata = SimpleNamespace(num_rows=table.num_rows, size_bytes=table.nbytes)
    return SimpleNamespace(schema=table.schema, blocks=[SimpleNamespace(ref=table, metadata=metadata)], slices=(None,))


class HostInThread:
    """A `Stream` whose host is asked in an event loop in a thread, as an actor's is. ``restart`` loses all that it has."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.host = StreamHost(dataset)
        self.num_asked = 0
        self._generation = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        self._in_loop(self._begin_anew)

    def look(self, key: PassKey) -> Known:
        while (known := self._ask("look", key)) is None:
            pass
        return known  # type: ignore[no-any-return]

    def extend(self, key: PassKey, rank: int, needed: int, upto: int, have: Have, is_over: Callable[[], bool]) -> Known:
        self.num_asked += 1
        return _there(self._ask("extend", key, rank, needed, upto, have))  # type: ignore[no-any-return]

    def blocks(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        return _there(self._ask("blocks", key, execution, numbers))  # type: ignore[no-any-return]

    def fetch(self, ref: Any) -> Any:
        return ref[0]

    def leave(self, key: PassKey, rank: int) -> None:
        self._ask("leave", key, rank)

    def num_held(self) -> int:
        """Blocks that it holds on to."""
        return sum(len(one.index._refs) for one in self.host._passes.values())

    def num_passes(self) -> int:
        return self._ask("num_passes")  # type: ignore[no-any-return]

    def close(self) -> None:
        self._in_loop(self._end_passes)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _begin_anew(self) -> None:
        self._end_passes()
        self._generation += 1
        self.host = StreamHost(self.dataset)

    def _end_passes(self) -> None:
        for one in self.host._passes.values():
            one.close()

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
def hosted(dataset: Any) -> Iterator[HostInThread]:
    host = HostInThread(dataset)
    try:
        yield host
    finally:
        host.close()


def _there(answer: Any) -> Any:
    if answer is None:
        raise StreamLostError
    return answer
