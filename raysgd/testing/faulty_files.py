"""Storage that breaks while a checkpoint is written. Worker side, in the thread that writes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, final

from raysgd.checkpoint.checksum import Chunk
from raysgd.checkpoint.files import FileInfo, Files
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore


class FaultyStore:
    """What a writer needs of a `CheckpointStore`: the folder of a checkpoint, in which writing can fail.

    Args:
        reach: Told of ``"write"`` and ``"half_written"`` and the number of the checkpoint.
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
        """Let writes fail with an errno: so many, or for so many seconds."""
        with self._lock:
            self._error = error
            self._times = 0 if for_s is not None else times
            self._until = time.monotonic() + (for_s or 0)

    def slow_down(self, delay_s: float, times: int) -> None:
        """Let so many writes last longer by ``delay_s`` seconds."""
        with self._lock:
            self._delays += [delay_s] * times

    def check(self) -> None:
        """Wait, and fail, if it is time to."""
        with self._lock:
            delay_s = self._delays.pop() if self._delays else 0.0
        time.sleep(delay_s)
        with self._lock:
            if self._times == 0 and time.monotonic() >= self._until:
                return
            self._times = max(0, self._times - 1)
        raise OSError(self._error, f"{os.strerror(self._error)} (a fault that was planned)")


@final
class FaultyFiles(Files):
    """Files whose writing tells where it is, and may fail.

    Args:
        reach: Told of ``"write"`` before the first byte of a file, and of ``"half_written"``.
        check: Raises what is to go wrong.
    """

    def __init__(self, files: Files, reach: Callable[[str], None], check: Callable[[], None]) -> None:
        self.root = files.root
        self._files = files
        self._reach = reach
        self._check = check

    def write(self, name: str, chunks: Iterable[Chunk], *, atomic: bool) -> tuple[int, int]:
        self._reach("write")
        self._check()
        return self._files.write(name, self._in_two(chunks), atomic=atomic)

    def _in_two(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The same bytes; in the middle of the first chunk the file is half-written."""
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

    def make_dirs(self, name: str) -> None:
        self._files.make_dirs(name)

    def delete_file(self, name: str) -> None:
        self._files.delete_file(name)

    def delete_dir(self, name: str) -> None:
        self._files.delete_dir(name)
