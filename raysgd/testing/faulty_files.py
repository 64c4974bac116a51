"""Storage that fails while a checkpoint is written. Runs in workers, in the thread that writes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, final

from raysgd.checkpoint.storage.files import Chunk, FileInfo, Files, Written
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore


class FaultyStore:
    """A `CheckpointStore` for a writer, whose folders fail or delay writes on demand.

    Args:
        reach: Called with the phase, ``"write"`` or ``"half_written"``, and the number of the checkpoint.
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
        folder = self._store.directory(number)
        folder._files = FaultyFiles(folder._files, lambda phase: self._reach(phase, number), self.check)
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

    def check(self) -> None:
        """Delay the current write, and raise its planned error."""
        with self._lock:
            delay_s = self._delays.pop() if self._delays else 0.0
        time.sleep(delay_s)
        with self._lock:
            if self._times == 0 and time.monotonic() >= self._until:
                return
            self._times = max(0, self._times - 1)
        raise OSError(self._error, f"{os.strerror(self._error)} (a planned fault)")


@final
class FaultyFiles(Files):
    """Files whose writes report their progress and may fail.

    Args:
        reach: Called with ``"write"`` before the first byte of a file, and with ``"half_written"``.
        check: Raises the planned error of a write.
    """

    def __init__(self, files: Files, reach: Callable[[str], None], check: Callable[[], None]) -> None:
        self.root = files.root
        self._files = files
        self._reach = reach
        self._check = check

    def write(self, name: str, chunks: Iterable[Chunk]) -> Written:
        self._reach("write")
        self._check()
        return self._files.write(name, self._split_first(chunks))

    def _split_first(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the same bytes, with the phase ``"half_written"`` in the middle of the first chunk."""
        for number, chunk in enumerate(chunks):
            if number:
                yield chunk
                continue
            view = memoryview(chunk).cast("B")
            yield view[: len(view) // 2]
            self._reach("half_written")
            yield view[len(view) // 2 :]

    def open_input(self, name: str) -> BinaryIO:
        return self._files.open_input(name)

    def info(self, name: str) -> FileInfo | None:
        return self._files.info(name)

    def list_names(self, name: str) -> list[str]:
        return self._files.list_names(name)

    def list_folders(self, name: str) -> list[str]:
        return self._files.list_folders(name)

    def make_dirs(self, name: str) -> None:
        self._files.make_dirs(name)

    def delete_file(self, name: str) -> None:
        self._files.delete_file(name)

    def delete_dir(self, name: str) -> None:
        self._files.delete_dir(name)
