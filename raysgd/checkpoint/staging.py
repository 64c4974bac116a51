"""Host memory that snapshots are copied into: allocated once, so that its pages are there at the next save.

A copy of 512 MB into memory the process has used before takes a tenth of what it takes into fresh memory, whose pages
the kernel must find and clear first. Used by a worker's training thread (`StagingPool.acquire`) and its writer threads.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
import weakref
from typing import Any, final

import numpy as np

from raysgd.checkpoint.leaves import ByteArray
from raysgd.errors import CheckpointError, ConfigError

_PAGE_BYTES = 4096
_ROUND_BYTES = 2 << 20
_MIN_PREFAULT_BYTES = 16 << 20  # smaller buffers are not worth a thought
_WAKE_S = 0.2


@final
class StagingBuffer:
    """One buffer of a pool. Whoever acquired it owns it until it is released.

    Attributes:
        num_bytes: How much of it is in use.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._memory: ByteArray = np.empty(0, np.uint8)
        self._is_for_gpu = False

    @property
    def view(self) -> ByteArray:
        """The bytes in use."""
        return self._memory[: self.num_bytes]

    @property
    def capacity(self) -> int:
        return self._memory.size

    def reserve(self, num_bytes: int, *, pinned: bool) -> None:
        """Make room; what was in the buffer is lost if it grows."""
        if num_bytes > self.capacity or (pinned and not self._is_for_gpu):
            self._memory = np.empty(0, np.uint8)  # freed before the new one is made
            # A little more than asked for: the next state's JSON may be a few digits longer.
            self._memory = np.empty(-(-(num_bytes + num_bytes // 64) // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
            self._is_for_gpu = pinned
            if pinned:  # where it does not work the copies are slower, that is all
                _pin(self._memory)
        self.num_bytes = num_bytes

    def touch(self) -> None:
        """Have the kernel find all pages now."""
        self._memory[::_PAGE_BYTES] = 0


@final
class StagingPool:
    """A fixed number of buffers, reused. Thread-safe.

    Waiting in `acquire` is the back-pressure of checkpoints: training may be ahead of storage by the pool and no more.

    Attributes:
        waited_s: Seconds that calls of `acquire` have waited in all.
    """

    def __init__(self, num_buffers: int = 2, max_pending_bytes: int = 4 << 30) -> None:
        """
        Args:
            num_buffers: Snapshots that may wait to be written.
            max_pending_bytes: Bytes they may have in all; one alone may have more.
        """
        if num_buffers < 1 or max_pending_bytes < 1:
            raise ConfigError(f"StagingPool({num_buffers=}, {max_pending_bytes=}) holds nothing; give values >= 1.")
        self.waited_s = 0.0
        self._num_buffers = num_buffers
        self._free: list[StagingBuffer] = []
        # Weak: an exception injected into the training thread can lose a buffer between two lines; the pool then makes
        # another one.
        self._busy: weakref.WeakSet[StagingBuffer] = weakref.WeakSet()
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._closed = False
        self._pinned = False

    def acquire(self, num_bytes: int, *, pinned: bool = False) -> StagingBuffer:
        """A buffer of at least ``num_bytes``; waits while all are in use.

        Args:
            num_bytes: Room needed.
            pinned: Prefer page-locked memory, into which a GPU copies faster and without blocking.

        Raises:
            CheckpointError: The pool was closed.
        """
        with self._changed:
            while not self._has_room(num_bytes):
                began = time.monotonic()
                # Woken by release and close. The timeout is for an exception injected into this thread, which lands
                # only when the thread runs Python code.
                self._changed.wait(_WAKE_S)
                self.waited_s += time.monotonic() - began
            buffer = self._take(self._best_fit(num_bytes))
            buffer.num_bytes = num_bytes
            self._pinned = pinned
        try:
            buffer.reserve(num_bytes, pinned=pinned)
        except BaseException:
            self.release(buffer)
            raise
        return buffer

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back; views on it are invalid from here on. Twice is as once."""
        with self._changed:
            if buffer in self._busy:
                self._busy.discard(buffer)
                buffer.num_bytes = 0
                self._free.append(buffer)
                self._changed.notify_all()

    def prefault(self, num_bytes: int) -> None:
        """Give the buffers that are free, and small, the room of ``num_bytes`` and their pages.

        For a writer thread, before the first write: the second save then finds a buffer as ready as the third does.
        """
        while num_bytes >= _MIN_PREFAULT_BYTES and (buffer := self._take_small(num_bytes)) is not None:
            try:
                buffer.reserve(num_bytes, pinned=self._pinned)
                buffer.touch()
            finally:
                self.release(buffer)

    def close(self) -> None:
        """Make waiting and later `acquire` calls fail; snapshots in flight go on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def pending_bytes(self) -> int:
        """Bytes of snapshots in flight."""
        with self._changed:
            return self._pending()

    def _pending(self) -> int:
        return sum(buffer.num_bytes for buffer in self._busy)

    def _has_room(self, num_bytes: int) -> bool:
        if self._closed:
            raise CheckpointError(
                "the staging buffers were closed: the attempt is over, so nothing more is saved in it"
            )
        num_busy = len(self._busy)
        return num_busy < self._num_buffers and (not num_busy or self._fits(num_bytes))

    def _fits(self, num_bytes: int) -> bool:
        return self._pending() + num_bytes <= self._max_pending_bytes

    def _take(self, buffer: StagingBuffer) -> StagingBuffer:
        self._free.remove(buffer)
        self._busy.add(buffer)
        return buffer

    def _best_fit(self, num_bytes: int) -> StagingBuffer:
        """The smallest buffer that is large enough, else the largest, which has least to grow."""
        self._complete()
        enough = [buffer for buffer in self._free if buffer.capacity >= num_bytes]
        return min(enough, key=_capacity) if enough else max(self._free, key=_capacity)

    def _take_small(self, num_bytes: int) -> StagingBuffer | None:
        with self._changed:
            self._complete()
            small = [buffer for buffer in self._free if buffer.capacity < num_bytes]
            return self._take(small[0]) if small and not self._closed and self._fits(num_bytes) else None

    def _complete(self) -> None:
        """Make the buffers that do not exist yet, or were lost."""
        self._free += [StagingBuffer() for _ in range(self._num_buffers - len(self._busy) - len(self._free))]


def _capacity(buffer: StagingBuffer) -> int:
    return buffer.capacity


def _pin(memory: ByteArray) -> None:
    """Page-lock memory for CUDA, if possible.

    Registered, not allocated by torch: its pinned allocator rounds up to a power of two.
    """
    torch: Any = importlib.import_module("torch")
    if not memory.size or not torch.cuda.is_available():
        return
    address = memory.__array_interface__["data"][0]
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, memory.size, 0)) == 0:
        weakref.finalize(memory, _unpin, runtime, address)


def _unpin(runtime: Any, address: int) -> None:
    with contextlib.suppress(Exception):  # at interpreter exit the runtime may be gone before the memory
        runtime.cudaHostUnregister(address)
