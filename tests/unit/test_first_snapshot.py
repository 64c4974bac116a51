"""The memory of a first checkpoint is mapped when the first step of an optimizer shows the size of the state."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.workers.liveness.memory_use import MemoryFiles, MemoryPool
from raysgd.workers.process.first_snapshot import FirstSnapshot

_NUMBERS = 8 << 20


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[StagingPool]:
    """A pool of a process on a node with a terabyte of free memory."""
    free = [MemoryPool("the node", limit_bytes=1 << 40, used_bytes=0)]
    monkeypatch.setattr(MemoryFiles, "pools_of", lambda self, pid: free)
    pool = StagingPool(num_buffers=2)
    yield pool
    pool.close()


def train_a_step(
    pool: StagingPool, *, rank: int = 0, num_local: int = 1, expects_save: bool = True
) -> dict[str, object]:
    """Return the state after one step of Adam on one large parameter; pages are mapped when this returns."""
    snapshot = FirstSnapshot(pool, rank=rank, num_local=num_local, expects_save=lambda: expects_save)
    snapshot.begin()
    parameter = torch.nn.Parameter(torch.zeros(_NUMBERS))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(_NUMBERS)
    optimizer.step()
    snapshot.close()
    for thread in threading.enumerate():
        if thread.name == "raysgd-pages":
            thread.join()
    optimizer.step()  # nothing is watched any more
    return {"parameter": parameter, "optimizer": optimizer.state_dict()}


def largest(pool: StagingPool) -> int:
    return max((buffer.capacity for buffer in pool._free), default=0)


def test_buffer_has_room_for_the_state_with_that_of_the_optimizer(pool: StagingPool) -> None:
    state = train_a_step(pool)
    mapped = largest(pool)
    take_snapshot(state, pool).release()
    assert largest(pool) == mapped >= 3 * 4 * _NUMBERS, "the first save used the memory that was mapped"


@pytest.mark.parametrize("arguments", [{"rank": 1}, {"expects_save": False}, {"num_local": 10_000}])
def test_nothing_is_mapped_for_a_rank_that_saves_nothing_or_without_memory(
    pool: StagingPool, arguments: dict[str, int]
) -> None:
    train_a_step(pool, **arguments)
    assert largest(pool) == 0


def test_nothing_is_mapped_where_free_memory_is_not_known(pool: StagingPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[MemoryPool] = []
    monkeypatch.setattr(MemoryFiles, "pools_of", lambda self, pid: pools)
    train_a_step(pool)
    assert largest(pool) == 0
    pools.append(MemoryPool("the node", limit_bytes=1 << 40, used_bytes=0))
    train_a_step(pool)
    assert largest(pool) > 0


def test_a_buffer_that_is_large_enough_is_kept(pool: StagingPool) -> None:
    take_snapshot({"large": torch.zeros(8 * _NUMBERS)}, pool).release()
    before = [id(buffer._memory) for buffer in pool._free]
    train_a_step(pool)
    assert [id(buffer._memory) for buffer in pool._free] == before
