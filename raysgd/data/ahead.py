"""Batches that are made ahead of the loop, in a thread: what a user's function, or a GPU's copy engine, has to do for them.

Worker side. One thread, so that batches are made in their order, and one after the other: a function that is not made for
threads needs no lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from raysgd.data.device_copies import cuda_device, use_cuda_device

T = TypeVar("T")

#: How much may be ready and not yet taken; one batch in any case.
MAX_BYTES = 256 * 2**20
#: Seconds that the loop waits in one piece: nothing can end a thread that waits for another.
_POLL_S = 0.2
#: Seconds for a batch that is being made when nobody wants it any more. The thread ends after it in any case.
_CLOSE_S = 5.0


class Making:
    """What the batches of one dataset are made with: by one thread at a time. Also knows who makes some ahead.

    Attributes:
        lock: Held while a batch is made.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._ahead: WeakSet[MadeAhead[Any]] = WeakSet()

    def ahead(self, items: Iterator[T], depth: int) -> MadeAhead[T]:
        """Have them made ahead."""
        made = MadeAhead(items, depth, num_bytes)
        self._ahead.add(made)
        return made

    def stop(self) -> None:
        """Make no more ahead. Does not wait."""
        for made in list(self._ahead):
            made.stop()


class MadeAhead(Generic[T]):
    """An iterator whose items are made in a thread, up to ``depth`` of them before they are asked for.

    What making one raises is raised where it is asked for, and ends it.

    Args:
        items: Makes them; used in the thread alone.
        depth: At least 1.
        size_of: Bytes of an item.
    """

    def __init__(self, items: Iterator[T], depth: int, size_of: Any) -> None:
        self._items = items
        self._depth = depth
        self._size_of = size_of
        self._ready: deque[tuple[T, int]] = deque()
        self._num_bytes = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._device = cuda_device()
        self._thread = threading.Thread(target=self._make, name="raysgd-batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> MadeAhead[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            while not self._changed.wait_for(lambda: self._ready or self._is_over, _POLL_S):
                pass  # where the loop can be interrupted
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
        """Make no more. Does not wait."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Make no more. Waits for the one that is being made, but not for ever."""
        self.stop()
        until = time.monotonic() + _CLOSE_S
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(_POLL_S)
        self._ready.clear()

    def _make(self) -> None:
        error: BaseException | None = None
        try:
            use_cuda_device(self._device)
            while self._wait_for_room():
                item = next(self._items)
                size = self._size_of(item)
                with self._changed:
                    self._ready.append((item, size))
                    self._num_bytes += size
                    self._changed.notify_all()
                del item  # else the thread holds a batch that nobody else does any more
        except StopIteration:
            pass
        except BaseException as failure:
            error = failure
        with self._changed:
            self._error, self._is_over = error, True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Whether there is one more to be made."""
        with self._changed:
            self._changed.wait_for(self._has_room_or_is_over)
            return not self._is_over

    def _has_room_or_is_over(self) -> bool:
        is_full = len(self._ready) >= self._depth or (bool(self._ready) and self._num_bytes >= MAX_BYTES)
        return self._is_over or not is_full


def num_bytes(batch: Any) -> int:
    """Of the tensors and arrays in a batch; what is no such counts for nothing."""
    if isinstance(batch, Mapping):
        return sum(num_bytes(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(num_bytes(value) for value in batch)
    size = getattr(batch, "nbytes", 0)
    return size if isinstance(size, int) else 0
