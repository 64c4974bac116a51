"""The pool of staging buffers: reuse, back-pressure, release."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.checkpoint.snapshot import StagingPool
from raysgd.errors import CheckpointError
from support.poll import until


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def address(buffer: Any) -> int:
    return int(buffer.view.ctypes.data)


def is_blocked(thread: threading.Thread) -> bool:
    thread.join(0.05)
    return thread.is_alive()


def test_buffers_are_reused() -> None:
    pool = StagingPool(num_buffers=1)
    first = pool.acquire(1000)
    where = address(first)
    pool.release(first)
    second = pool.acquire(900)
    assert address(second) == where and second.view.size == 900 and second.view.dtype == np.uint8


def test_best_fitting_buffer_is_used() -> None:
    pool = StagingPool(num_buffers=2)
    small, large = pool.acquire(10), pool.acquire(50 << 20)
    pool.release(large)
    pool.release(small)
    assert pool.acquire(20) is small
    assert pool.acquire(20 << 20) is large


def test_buffers_grow() -> None:
    pool = StagingPool(num_buffers=1)
    buffer = pool.acquire(10)
    pool.release(buffer)
    buffer = pool.acquire(30 << 20)
    assert buffer.view.size == 30 << 20 <= buffer.capacity


def test_acquire_waits_while_all_buffers_are_in_use() -> None:
    pool = StagingPool(num_buffers=2)
    first, second = pool.acquire(1), pool.acquire(1)
    thread, results = in_thread(lambda: pool.acquire(1))
    assert is_blocked(thread)
    pool.release(first)
    thread.join(30)
    assert results == [first] and results != [second]


def test_pending_bytes_are_bounded() -> None:
    pool = StagingPool(num_buffers=3, max_pending_bytes=100)
    first = pool.acquire(80)
    second = pool.acquire(20)
    assert second.num_bytes == 20 and pool.pending_bytes == 100
    thread, results = in_thread(lambda: pool.acquire(10))
    assert is_blocked(thread)
    pool.release(first)
    thread.join(30)
    assert results[0].num_bytes == 10 and pool.pending_bytes == 30


def test_snapshot_larger_than_the_bound_is_allowed_alone() -> None:
    pool = StagingPool(num_buffers=2, max_pending_bytes=100)
    large = pool.acquire(1000)
    thread, results = in_thread(lambda: pool.acquire(1))
    assert is_blocked(thread)
    pool.release(large)
    thread.join(30)
    assert len(results) == 1


def test_second_release_does_nothing() -> None:
    pool = StagingPool(num_buffers=2)
    buffer = pool.acquire(10)
    pool.release(buffer)
    pool.release(buffer)
    first, second = pool.acquire(10), pool.acquire(10)
    assert first is not second


def test_lost_buffer_is_replaced() -> None:
    pool = StagingPool(num_buffers=1)
    for _ in range(3):
        buffer = pool.acquire(10)
        del buffer  # as when an exception is injected right after acquire
    assert pool.pending_bytes == 0


def test_close_ends_waiting_acquires() -> None:
    pool = StagingPool(num_buffers=1)
    held = pool.acquire(1)
    thread, results = in_thread(lambda: pool.acquire(1))
    assert is_blocked(thread)
    pool.close()
    thread.join(30)
    assert isinstance(results[0], CheckpointError)
    with pytest.raises(CheckpointError, match="closed"):
        pool.acquire(1)
    pool.release(held)
    assert pool.pending_bytes == 0


def test_exception_injected_into_waiting_acquire_is_raised() -> None:
    import ctypes

    pool = StagingPool(num_buffers=1)
    held = pool.acquire(1)
    thread, results = in_thread(lambda: pool.acquire(1))
    assert until(lambda: pool._changed._waiters, 20)  # type: ignore[attr-defined]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
    thread.join(30)
    assert isinstance(results[0], KeyboardInterrupt)
    pool.release(held)
    assert pool.acquire(1) is held


def test_buffer_that_cannot_grow_returns_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StagingPool(num_buffers=1)
    with pytest.raises((MemoryError, ValueError)):
        pool.acquire(1 << 62)
    assert pool.acquire(10).num_bytes == 10


def test_free_buffers_are_prefaulted() -> None:
    pool = StagingPool(num_buffers=3)
    first = pool.acquire(20 << 20)
    pool.prefault(20 << 20)
    second, third = pool.acquire(20 << 20), pool.acquire(20 << 20)
    for buffer in (second, third):
        assert (buffer.view[::4096] == 0).all()
    assert pool.pending_bytes == 3 * (20 << 20)
    for buffer in (first, second, third):
        pool.release(buffer)
    assert pool.pending_bytes == 0


def test_prefault_respects_the_bound_and_skips_small_buffers() -> None:
    pool = StagingPool(num_buffers=2, max_pending_bytes=30 << 20)
    held = pool.acquire(20 << 20)
    pool.prefault(20 << 20)
    pool.release(held)
    held = pool.acquire(20 << 20)
    assert pool.acquire(1).capacity < 20 << 20, "the other buffer must not grow"
    other = StagingPool(num_buffers=2)
    small = other.acquire(10 << 20)
    other.prefault(10 << 20)
    assert other.acquire(1).capacity < small.capacity


class Gpu:
    """Stands for CUDA: each thread has a current device, and notes on which one memory is page-locked and unlocked."""

    def __init__(self) -> None:
        self.used: list[tuple[str, int]] = []
        self._current = threading.local()

    def device(self, device: torch.device) -> Any:
        @contextmanager
        def chosen() -> Iterator[None]:
            before, self._current.index = getattr(self._current, "index", 0), device.index
            yield
            self._current.index = before

        return chosen()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.used.append(("lock", getattr(self._current, "index", 0)))
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.used.append(("unlock", getattr(self._current, "index", 0)))


def test_memory_is_page_locked_for_the_gpu_that_is_saved_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's thread begins on GPU 0, which belongs to another worker."""
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device", gpu.device)
    pool = StagingPool(num_buffers=2)
    pool.release(pool.acquire(20 << 20, gpu=torch.device("cuda", 2)))
    thread, _ = in_thread(partial(pool.prefault, 20 << 20))
    thread.join(10)
    assert gpu.used == [("lock", 2)] * 2
    large = pool.acquire(40 << 20, gpu=torch.device("cuda", 2))  # larger than both
    assert gpu.used[2:] == [("unlock", 2), ("lock", 2)]
    del pool, large
    gc.collect()
    assert gpu.used[4:] == [("unlock", 2)] * 2
