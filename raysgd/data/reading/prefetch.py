"""Prefetching: makes batches ahead of the loop, in a thread. Worker side.

One thread per loop makes its batches in order and one at a time, so that ``collate_fn`` need not be thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from raysgd._util.imports import imported

T = TypeVar("T")

#: Limit of the prefetched batches; one batch is always prefetched, whatever its size.
MAX_BYTES = 256 * 2**20
#: Seconds of one wait: Python cannot interrupt a thread during a longer one.
_POLL_S = 0.2
#: Seconds that `PrefetchIterator.close` waits for the batch in progress. The thread ends after that batch in any case.
CLOSE_S = 5.0


class Prefetchers:
    """The prefetch threads of one reader, and the lock under which batches are read from it.

    Attributes:
        lock: Held while a batch is read: readers are not thread-safe, and loops share them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._running: WeakSet[PrefetchIterator[Any]] = WeakSet()

    def start(self, items: Iterator[T], depth: int) -> PrefetchIterator[T]:
        """Start a thread that makes up to ``depth`` items ahead."""
        prefetched = PrefetchIterator(items, depth)
        self._running.add(prefetched)
        return prefetched

    def stop(self) -> None:
        """Stop all prefetch threads. Does not wait for them."""
        for prefetched in list(self._running):
            prefetched.stop()


class PrefetchIterator(Generic[T]):
    """An iterator whose items a thread makes, up to ``depth`` of them ahead of the caller.

    An exception of ``items`` is raised by the ``next()`` that asks for that item, and ends the iterator.

    Args:
        items: Makes the items; used in the thread alone.
        depth: At least 1.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[tuple[T, int]] = deque()
        self._num_bytes = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._device = _current_cuda_device()
        self._thread = threading.Thread(target=self._run, name="raysgd-batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> PrefetchIterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            while not self._changed.wait_for(lambda: self._ready or self._is_over, _POLL_S):
                pass  # Python can interrupt the thread here
            if not self._ready:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopIteration
            item, size = self._ready.popleft()
            self._num_bytes -= size
            self._changed.notify_all()
        return item

    def stop(self) -> None:
        """Make no more items. Does not wait for the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Make no more items, and wait up to `CLOSE_S` for the one in progress."""
        self.stop()
        until = time.monotonic() + CLOSE_S
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(_POLL_S)
        self._ready.clear()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if self._device is not None:
                imported("torch").cuda.set_device(self._device)
            while self._wait_for_room():
                item = next(self._items)
                size = num_bytes(item)
                with self._changed:
                    self._ready.append((item, size))
                    self._num_bytes += size
                    self._changed.notify_all()
                del item  # else the thread keeps a batch alive that the loop has released
        except StopIteration:
            pass
        except BaseException as failure:
            error = failure
        with self._changed:
            self._error, self._is_over = error, True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until one more item may be made; return False if the iterator was stopped."""
        with self._changed:
            self._changed.wait_for(self._has_room_or_is_over)
            return not self._is_over

    def _has_room_or_is_over(self) -> bool:
        is_full = len(self._ready) >= self._depth or (bool(self._ready) and self._num_bytes >= MAX_BYTES)
        return self._is_over or not is_full


def _current_cuda_device() -> int | None:
    """Return the CUDA device of this thread, which torch keeps per thread; None if CUDA is not in use."""
    torch = imported("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None


def num_bytes(batch: Any) -> int:
    """Return the size of the tensors and arrays in a batch."""
    if isinstance(batch, Mapping):
        return sum(num_bytes(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(num_bytes(value) for value in batch)
    size = getattr(batch, "nbytes", 0)
    return size if isinstance(size, int) else 0
