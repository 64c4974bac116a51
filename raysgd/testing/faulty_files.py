"""Storage that fails while a checkpoint is written. Runs in workers, in the thread that writes."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from raysgd.checkpoint.storage.files import Chunk
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore


class FaultyStore:
    """A `CheckpointStore` for a writer, whose folders fail or delay writes on demand.

    Args:
        reach: Called before the first byte of a file and in its middle, with the phase, ``"write"`` or ``"half_written"``,
            and the number of the checkpoint.
    """

    def __init__(self, store: CheckpointStore, reach: Callable[[str, int], None]) -> None:
        self._store = store
        self._reach = reach
        self._lock = threading.Lock()
        self._error = 0
        self._times = 0
        self._until = 0.0
        self._delays: list[float] = []

    def directory(self, number: int) -> Storage:
        folder = self._store.directory(number)  # a new object, with `Files` of its own
        folder._files.write = functools.partial(self._write, folder._files.write, number)  # type: ignore[method-assign]
        return folder

    def fail(self, error: int, times: int, for_s: float | None) -> None:
        """Make the next ``times`` writes fail with an errno, or all writes within ``for_s`` seconds."""
        with self._lock:
            self._error = error
            self._times = 0 if for_s is not None else times
            self._until = time.monotonic() + (for_s or 0)

    def slow_down(self, delay_s: float, times: int) -> None:
        """Delay the next ``times`` writes by ``delay_s`` seconds each."""
        with self._lock:
            self._delays += [delay_s] * times

    def _write(
        self, write: Callable[..., tuple[int, int]], number: int, name: str, chunks: Iterable[Chunk], *, atomic: bool
    ) -> tuple[int, int]:
        """Write a file of a checkpoint in place of `Files.write`."""
        self._reach("write", number)
        self._delay_or_fail()
        return write(name, self._split_first(number, chunks), atomic=atomic)

    def _delay_or_fail(self) -> None:
        with self._lock:
            delay_s = self._delays.pop() if self._delays else 0.0
        time.sleep(delay_s)
        with self._lock:
            if self._times == 0 and time.monotonic() >= self._until:
                return
            self._times = max(0, self._times - 1)
        raise OSError(self._error, f"{os.strerror(self._error)} (a planned fault)")

    def _split_first(self, number: int, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the same bytes, with the phase ``"half_written"`` in the middle of the first chunk."""
        for place, chunk in enumerate(chunks):
            if place:
                yield chunk
                continue
            view = memoryview(chunk).cast("B")
            yield view[: len(view) // 2]
            self._reach("half_written", number)
            yield view[len(view) // 2 :]
