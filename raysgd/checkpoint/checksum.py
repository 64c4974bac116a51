"""crc32 of a stream, computed beside the reading or writing of it.

A crc of 512 MB costs about as much time as handing the bytes to the kernel, so doing one after the other would halve
the speed of a write. ``zlib.crc32`` and ``os.write`` both release the GIL, hence a second thread.
"""

from __future__ import annotations

import queue
import threading
import zlib
from types import TracebackType
from typing import TypeAlias

Chunk: TypeAlias = "bytes | bytearray | memoryview"

CHUNK_BYTES = 8 << 20
_INLINE_BYTES = 1 << 20  # below this a thread costs more than it saves
_MAX_AHEAD = 4  # chunks held for the checksum while the writer has gone on


class Checksum:
    """Feed it chunks in order; a chunk must not change until the `with` block ends. One writer thread at a time."""

    def __init__(self) -> None:
        self._crc32 = 0
        self._chunks: queue.Queue[Chunk | None] = queue.Queue(_MAX_AHEAD)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Checksum:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def update(self, chunk: Chunk) -> None:
        if self._thread is None and (len(chunk) < _INLINE_BYTES or not self._start()):
            self._crc32 = zlib.crc32(chunk, self._crc32)
        else:
            self._chunks.put(chunk)

    def result(self) -> int:
        """The crc32 of everything fed so far; waits for the second thread."""
        self._finish()
        return self._crc32

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="raysgd-crc32", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads any more
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._crc32 = zlib.crc32(chunk, self._crc32)

    def _finish(self) -> None:
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()
            self._thread = None
