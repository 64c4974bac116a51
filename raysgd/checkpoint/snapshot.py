"""`take_snapshot` copies a state to host memory, complete and independent, so that it is written while training continues.

The copy goes into a staging buffer that is allocated once and reused. A copy of 512 MB into memory that the process has
used before takes a tenth of a copy into fresh memory, whose pages the kernel must first find and clear.

Used by a worker's training thread (`take_snapshot`) and its writer threads (`Snapshot.write`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raysgd.checkpoint.codecs.frameworks import synchronize
from raysgd.checkpoint.codecs.leaves import ByteArray, Leaf, LeafList
from raysgd.checkpoint.codecs.shards import ShardWriter
from raysgd.checkpoint.codecs.tree import Encoder
from raysgd.checkpoint.format.parts import FOOTER_BYTES, encode_tree, write_footer, write_payload
from raysgd.checkpoint.format.safetensors import encode_header
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointError

#: States of at least this size are copied by several threads; smaller ones are not worth starting threads.
PARALLEL_BYTES = 32 << 20
_MAX_THREADS = 4
_PAGE_BYTES = 4096
_ROUND_BYTES = 2 << 20
_MIN_PREFAULT_BYTES = 16 << 20  # smaller buffers are not worth the work
_WAKE_S = 0.2


def take_snapshot(
    state: Any, pool: StagingPool, *, allow_pickle: bool = False, shards: ShardWriter | None = None
) -> Snapshot:
    """Copy a state. When this returns, the caller may change the state.

    Args:
        state: Any tree of containers, scalars, tensors and objects with ``state_dict()``.
        pool: Provides the buffer for the copy; waits while all its buffers are in use.
        allow_pickle: Pickle values that nothing else can hold.
        shards: Collects this rank's array shards; None if the rank saves for all ranks.

    Raises:
        UnsafeStateError: Only pickle could hold a value, and ``allow_pickle`` is False.
        CheckpointError: The state contains itself, nests too deeply, or holds a tensor that cannot be saved; or the pool
            was closed.
    """
    laid_out = lay_out(state, allow_pickle=allow_pickle, shards=shards)
    header, leaves, tree = laid_out.header, laid_out.leaves, laid_out.tree
    num_tensor_bytes = laid_out.num_tensor_bytes
    devices = (leaf.device for leaf in leaves if leaf.device is not None)
    gpu = next((device for device in devices if device.type == "cuda"), None)
    buffer = pool.acquire(num_tensor_bytes + len(tree) + FOOTER_BYTES, gpu=gpu)
    try:
        _fill(buffer.view, header, leaves, tree)
        write_footer(buffer.view, num_tensor_bytes, len(tree))
        unsharded = None
        if shards is not None and shards.table:
            unsharded = _unsharded_ranges(laid_out, shards.names)
            unsharded.append((num_tensor_bytes, num_tensor_bytes + laid_out.num_state_bytes))
        return Snapshot(pool, buffer, unsharded)
    except BaseException:  # also AttemptEnded: a lost buffer would block the saves of the next attempt
        pool.release(buffer)
        raise


@final
class Snapshot:
    """One rank's part in a staging buffer. Used by one thread at a time; `release` by any.

    Args:
        unsharded: Byte ranges of everything except array shards; None for a part without shards.

    Attributes:
        num_bytes: Size of the payload.
    """

    def __init__(
        self,
        pool: StagingPool,
        buffer: StagingBuffer,
        unsharded: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.num_bytes = buffer.num_bytes
        self._pool = pool
        self._buffer: StagingBuffer | None = buffer
        self._unsharded = unsharded

    def payload(self) -> ByteArray:
        """Return the part as one array of bytes: a view that is valid until `release`."""
        if self._buffer is None:
            raise CheckpointError("the snapshot was released, and its buffer may hold another one")
        return self._buffer.view

    def unsharded_digest(self) -> str | None:
        """Return a digest of everything except array shards, by which ranks are compared; None without shards."""
        if self._unsharded is None:
            return None
        payload = self.payload()
        digest = hashlib.blake2b(digest_size=16)
        for begin, end in self._unsharded:
            digest.update(payload[begin:end].data)
        return digest.hexdigest()

    def write(self, storage: Storage, prefix: str) -> list[FileEntry]:
        """Write the part's files; see `write_payload`. Called by a writer thread, it also prefaults the pool's other buffers.

        Raises:
            StorageError: Writing still failed after all retries.
        """
        payload = self.payload()
        self._pool.prefault(self.num_bytes)
        return write_payload(payload, storage, prefix)

    def release(self) -> None:
        """Return the buffer to the pool. Must be called, also after a failed write; a second call does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.release(buffer)


@dataclass(frozen=True)
class LaidOut:
    """A state as one part: where everything is, before anything is copied.

    Attributes:
        tree: The content of the tree file; the state takes its first ``num_state_bytes``.
        header: The beginning of the tensors file, which the leaves follow.
        names: The names of the leaves.
    """

    tree: bytes
    num_state_bytes: int
    header: bytes
    names: Sequence[str]
    leaves: Sequence[Leaf]

    @property
    def num_tensor_bytes(self) -> int:
        return len(self.header) + sum(leaf.num_bytes for leaf in self.leaves)


def lay_out(state: Any, *, allow_pickle: bool = False, shards: ShardWriter | None = None) -> LaidOut:
    """Lay out a state; arguments and errors as for `take_snapshot`."""
    found = LeafList()
    node = Encoder(found.add, allow_pickle=allow_pickle, shards=shards).encode_state(state)
    tree, num_state_bytes = encode_tree(node, shards.table if shards is not None else {})
    # Wide elements first: the format allows no gaps, and this way each tensor is still aligned to its item size.
    placed = dict(sorted(found.named.items(), key=lambda item: -item[1].item_bytes))
    specs = ((name, leaf.dtype, leaf.shape, leaf.num_bytes) for name, leaf in placed.items())
    header = encode_header(specs, {"format": "pt"}) if placed else b""
    return LaidOut(tree, num_state_bytes, header, list(placed), list(placed.values()))


def _unsharded_ranges(laid_out: LaidOut, shards: Collection[str]) -> list[tuple[int, int]]:
    """Return the byte ranges of the leaves that are not shards."""
    ranges, begin = [], len(laid_out.header)
    for name, leaf in zip(laid_out.names, laid_out.leaves, strict=True):
        if name not in shards:
            ranges.append((begin, begin + leaf.num_bytes))
        begin += leaf.num_bytes
    return ranges


def _fill(target: ByteArray, header: bytes, leaves: Sequence[Leaf], tree: bytes) -> None:
    end = len(header)
    target.data[:end] = header
    copies: list[tuple[Leaf, ByteArray]] = []
    for leaf in leaves:
        copies.append((leaf, target[end : end + leaf.num_bytes]))
        end += leaf.num_bytes
    try:
        _copy([each for each in copies if each[0].device is not None], num_threads=1)
        in_memory = [each for each in copies if each[0].device is None]
        _copy(in_memory, num_threads=_num_threads(sum(leaf.num_bytes for leaf, _ in in_memory)))
    finally:  # also after an error: a late copy from a GPU would overwrite the buffer's next snapshot
        synchronize(leaves)
    target.data[end : end + len(tree)] = tree


def _copy(copies: Sequence[tuple[Leaf, ByteArray]], num_threads: int) -> None:
    if num_threads == 1:
        for leaf, area in copies:
            leaf.fill(leaf.source, area)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="raysgd-copy") as pool:  # its exit waits for all copies
        for done in [pool.submit(leaf.fill, leaf.source, area) for leaf, area in copies]:
            done.result()


def _num_threads(num_bytes: int) -> int:
    """Choose the number of copy threads: one core cannot saturate the memory bandwidth, a few can."""
    if num_bytes < PARALLEL_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, cores)


@final
class StagingPool:
    """A fixed number of reused buffers. Thread-safe.

    Waiting in `acquire` is the back-pressure of checkpoints: training can be ahead of storage by the size of the pool.

    Attributes:
        waited_s: Total seconds that calls of `acquire` have waited.
    """

    def __init__(self, num_buffers: int = 2, max_pending_bytes: int = 4 << 30) -> None:
        """
        Args:
            num_buffers: Snapshots that may wait to be written.
            max_pending_bytes: Bytes that they may have together; a single one may have more.
        """
        self.waited_s = 0.0
        self._num_buffers = num_buffers
        self._free: list[StagingBuffer] = []
        # Weak references: an exception injected into the training thread can lose a buffer between two lines. The pool then
        # makes another one.
        self._busy: weakref.WeakSet[StagingBuffer] = weakref.WeakSet()
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._closed = False
        self._gpu: Any = None

    def acquire(self, num_bytes: int, *, gpu: Any = None) -> StagingBuffer:
        """Return a buffer of at least ``num_bytes``; wait while all are in use.

        Args:
            num_bytes: Room needed.
            gpu: The CUDA device that copies into it. Memory is then page-locked if possible: copies are faster and do not
                block.

        Raises:
            CheckpointError: The pool was closed.
        """
        with self._changed:
            while not self._has_room(num_bytes):
                began = time.monotonic()
                # release and close wake it. The timeout lets an injected exception arrive, which happens only while this
                # thread runs Python code.
                self._changed.wait(_WAKE_S)
                self.waited_s += time.monotonic() - began
            buffer = self._take(self._best_fit(num_bytes))
            buffer.num_bytes = num_bytes
            self._gpu = gpu
        try:
            buffer.reserve(num_bytes, gpu=gpu)
        except BaseException:
            self.release(buffer)
            raise
        return buffer

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool; views on it become invalid. A second call does nothing."""
        with self._changed:
            if buffer in self._busy:
                self._busy.discard(buffer)
                buffer.num_bytes = 0
                self._free.append(buffer)
                self._changed.notify_all()

    def prepare(self, num_bytes: int, *, gpu: Any = None) -> None:
        """Map the pages of one buffer before the first save, unless there is one of this size.

        Args:
            num_bytes: The size of the save, or a little more.
            gpu: As for `acquire`.
        """
        with self._changed:
            if num_bytes < _MIN_PREFAULT_BYTES or any(
                buffer.capacity >= num_bytes for buffer in (*self._free, *self._busy)
            ):
                return
        if (buffer := self._take_small(num_bytes)) is not None:
            self._map(buffer, num_bytes, gpu)

    def prefault(self, num_bytes: int) -> None:
        """Grow free buffers that are smaller than ``num_bytes``, and map their pages.

        A writer thread calls this before the first write, so that the second save is as fast as the third.
        """
        while num_bytes >= _MIN_PREFAULT_BYTES and (buffer := self._take_small(num_bytes)) is not None:
            self._map(buffer, num_bytes, self._gpu)

    def close(self) -> None:
        """Make waiting and later `acquire` calls fail; snapshots in flight continue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def pending_bytes(self) -> int:
        """Bytes of snapshots in flight."""
        with self._changed:
            return sum(buffer.num_bytes for buffer in self._busy)

    def _map(self, buffer: StagingBuffer, num_bytes: int, gpu: Any) -> None:
        try:
            buffer.reserve(num_bytes, gpu=gpu)
            buffer.touch()
        finally:
            self.release(buffer)

    def _has_room(self, num_bytes: int) -> bool:
        if self._closed:
            raise CheckpointError(
                "the staging buffers were closed: the attempt has ended, so nothing more is saved in it"
            )
        num_busy = len(self._busy)
        return num_busy < self._num_buffers and (not num_busy or self._fits(num_bytes))

    def _fits(self, num_bytes: int) -> bool:
        return self.pending_bytes + num_bytes <= self._max_pending_bytes

    def _take(self, buffer: StagingBuffer) -> StagingBuffer:
        self._free.remove(buffer)
        self._busy.add(buffer)
        return buffer

    def _best_fit(self, num_bytes: int) -> StagingBuffer:
        """Return the smallest buffer that is large enough, else the largest, which has to grow least."""
        self._complete()
        self._free.sort(key=lambda buffer: buffer.capacity)
        return next((buffer for buffer in self._free if buffer.capacity >= num_bytes), self._free[-1])

    def _take_small(self, num_bytes: int) -> StagingBuffer | None:
        with self._changed:
            self._complete()
            small = [buffer for buffer in self._free if buffer.capacity < num_bytes]
            return self._take(small[0]) if small and not self._closed and self._fits(num_bytes) else None

    def _complete(self) -> None:
        """Make the buffers that do not exist yet or were lost."""
        self._free += [StagingBuffer() for _ in range(self._num_buffers - len(self._busy) - len(self._free))]


@final
class StagingBuffer:
    """One buffer of a pool. It belongs to its acquirer until it is released.

    Attributes:
        num_bytes: Number of bytes in use.
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

    def reserve(self, num_bytes: int, *, gpu: Any = None) -> None:
        """Make room; the content is lost if the buffer grows."""
        if num_bytes > self.capacity or (gpu is not None and not self._is_for_gpu):
            self._memory = np.empty(0, np.uint8)  # free it before allocating the new one
            # Allocate a little more: the JSON of the next state may be a few digits longer.
            self._memory = np.empty(-(-(num_bytes + num_bytes // 64) // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
            self._is_for_gpu = gpu is not None
            if gpu is not None:  # if pinning fails, copies are only slower
                _pin(self._memory, gpu)
        self.num_bytes = num_bytes

    def touch(self) -> None:
        """Make the kernel map all pages now."""
        self._memory[::_PAGE_BYTES] = 0


def _pin(memory: ByteArray, gpu: Any) -> None:
    """Page-lock memory for CUDA, if possible.

    The memory is registered with CUDA, not allocated by torch: torch's pinned allocator rounds up to a power of two.
    """
    torch: Any = importlib.import_module("torch")
    if not memory.size or not torch.cuda.is_available():
        return
    address = memory.__array_interface__["data"][0]
    runtime = torch.cuda.cudart()
    with torch.cuda.device(gpu):  # a new thread is on GPU 0, and would take memory there, which others use
        is_pinned = int(runtime.cudaHostRegister(address, memory.size, 0)) == 0
    if is_pinned:
        weakref.finalize(memory, _unpin, torch.cuda.device(gpu), runtime, address)


def _unpin(device: Any, runtime: Any, address: int) -> None:
    # At interpreter exit the CUDA runtime may end before the memory is freed.
    with contextlib.suppress(Exception), device:
        runtime.cudaHostUnregister(address)
