"""`FirstSnapshot`: the memory of a rank's first checkpoint, before train_func saves it. Runs in the worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from raysgd._util.imports import imported
from raysgd.checkpoint.snapshot import StagingPool
from raysgd.workers.liveness.memory_use import MemoryFiles

#: Names, the position in the data and what else a state has in addition to the tensors of the model and its optimizers.
_MARGIN = 1.05
#: The most that is taken of the memory that is free, by all workers of a node together.
_MAX_FRACTION = 0.25


class FirstSnapshot:
    """Maps the pages of a staging buffer in the background, once the first step of an optimizer shows how large the state is.

    The first copy into new memory waits while the kernel finds and clears every page, 1.2 to 1.5 s for 512 MB; a copy into
    pages that are there takes 0.05 to 0.1 s. Nothing is done for a rank that has nothing to save, nor where a quarter of the
    free memory is too small.

    Args:
        pool: The staging buffers.
        rank: The rank; all but 0 save only arrays that are distributed.
        num_local: The number of workers on this node.
        expects_save: Returns whether train_func will save a checkpoint.
    """

    def __init__(self, pool: StagingPool, *, rank: int, num_local: int, expects_save: Callable[[], bool]) -> None:
        self._pool = pool
        self._rank = rank
        self._num_local = num_local
        self._expects_save = expects_save
        self._seen: set[int] = set()
        self._num_bytes = 0
        self._hook: Any = None

    def begin(self) -> None:
        """Watch the optimizers of torch from now on, if the worker uses torch."""
        if imported("torch") is not None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._hook = register_optimizer_step_post_hook(self._on_step)

    def close(self) -> None:
        """Stop watching."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        tensors = list(_tensors_of(optimizer))
        if not self._expects_save() or (self._rank and not any(hasattr(tensor, "to_local") for tensor in tensors)):
            return
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        self._num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in local)
        num_bytes = int(self._num_bytes * _MARGIN)
        if num_bytes * self._num_local > _MAX_FRACTION * _free_bytes():
            return
        gpu = next((tensor.device for tensor in local if tensor.device.type == "cuda"), None)
        threading.Thread(
            target=self._pool.prepare, args=(num_bytes,), kwargs={"gpu": gpu}, name="raysgd-pages", daemon=True
        ).start()


def _tensors_of(optimizer: Any) -> Iterator[Any]:
    torch = imported("torch")
    assert torch is not None
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in list(optimizer.state.values()):
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _free_bytes() -> float:
    """Return the memory that this process can still take; 0 where that is not known."""
    return min((pool.limit_bytes - pool.used_bytes for pool in MemoryFiles().pools_of(os.getpid())), default=0)
