"""Blocks that must be loaded and decoded before their rows can be read: loaded ahead of the loop, released behind it.

Worker side. The order of the epoch says which blocks come next, so that no block is loaded without need or twice.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

#: Limit of the blocks that are held, including those loaded ahead of the loop. The blocks in use may take more, and one
#: block is always loaded ahead.
MAX_HELD_BYTES = 256 * 2**20
#: Threads that load: one waits for storage while another decodes, which Arrow does on all cores.
_NUM_LOADERS = 2
#: Blocks whose loading may be in progress.
MAX_LOADING = 8
#: Seconds of one wait: Python cannot interrupt a thread during a longer one.
_POLL_S = 0.5

T = TypeVar("T")


def wait_for(future: Future[T]) -> T:
    """Return the result of a thread. Unlike ``future.result()``, this wait can be interrupted."""
    while not wait([future], timeout=_POLL_S).done:
        pass
    return future.result()


class BlockCache:
    """The blocks that one reader holds or loads. Used by the thread that reads.

    Args:
        load: Returns a block, a Table; called in threads.

    Attributes:
        num_bytes: Size of the blocks that are held, without those that are loading.
        num_taken: How often `get` took a block that was not held before.
    """

    def __init__(self, load: Callable[[int], Any]) -> None:
        self._load = load
        self._held: dict[int, Any] = {}
        self._loading: dict[int, Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.num_bytes = 0
        self.num_taken = 0

    def get(self, number: int) -> Any:
        """Return a block; waits for it.

        Raises:
            DataError: The block cannot be read.
        """
        if number not in self._held:
            loading = self._loading.pop(number, None)
            block = self._load(number) if loading is None else wait_for(loading)
            self._held[number] = block
            self.num_bytes += block.nbytes
            self.num_taken += 1
        return self._held[number]

    @property
    def held(self) -> list[int]:
        """Numbers of the blocks that are held."""
        return list(self._held)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    def has_room(self) -> bool:
        """Whether one more block may be loaded ahead. Loading blocks are assumed to have the mean size of those held."""
        if not self._held:
            return len(self._loading) < _NUM_LOADERS
        expected = self.num_bytes / len(self._held) * (len(self._loading) + 1)
        return self.num_bytes + expected <= MAX_HELD_BYTES

    def load_ahead(self, number: int) -> None:
        """Start to load a block, unless it is held or loading."""
        if number in self._held or number in self._loading:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_LOADERS, thread_name_prefix="raysgd-data")
        self._loading[number] = self._pool.submit(self._load, number)

    def release(self, number: int) -> None:
        """Release a block, if it is held."""
        block = self._held.pop(number, None)
        if block is not None:
            self.num_bytes -= block.nbytes

    def stop(self) -> None:
        """Stop loading ahead. Blocks that are held stay."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._loading.clear()

    def close(self) -> None:
        """Stop loading and release all blocks. The cache can be used again."""
        self.stop()
        self._held.clear()
        self.num_bytes = 0
