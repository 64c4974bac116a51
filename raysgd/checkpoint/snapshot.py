"""`take_snapshot`: a state copied to host memory, complete and independent, ready to be written behind the training.

The copy is the only stall of a checkpoint. It goes straight to where the bytes lie in the file: the staging buffer *is*
the payload (`raysgd.checkpoint.payload`). Taken by a worker's training thread, written and released by a writer thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from raysgd.checkpoint.foreign import synchronize
from raysgd.checkpoint.leaves import ByteArray, Leaf, LeafList
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.parts import encode_tree
from raysgd.checkpoint.payload import FOOTER_BYTES, load_payload, write_footer, write_payload
from raysgd.checkpoint.shards import ShardWriter
from raysgd.checkpoint.staging import StagingBuffer, StagingPool
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.tensors import encode_header
from raysgd.checkpoint.tree import Encoder
from raysgd.errors import CheckpointError

__all__ = ["Snapshot", "StagingPool", "load_payload", "take_snapshot", "write_payload"]

#: States from this size on are copied by several threads; for less they are not worth being started.
_PARALLEL_BYTES = 32 << 20
_MAX_THREADS = 4


@final
class Snapshot:
    """One rank's part in a staging buffer. Used by one thread at a time; `release` by any.

    Args:
        beside: Where in it is what it has beside the pieces of arrays; None where it has no pieces.

    Attributes:
        num_bytes: Of the payload.
        num_pickled: Leaves that are pickles, so that loading needs ``trusted=True``.
    """

    def __init__(
        self,
        pool: StagingPool,
        buffer: StagingBuffer,
        num_pickled: int,
        beside: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.num_bytes = buffer.num_bytes
        self.num_pickled = num_pickled
        self._pool = pool
        self._buffer: StagingBuffer | None = buffer
        self._beside = beside

    def payload(self) -> ByteArray:
        """All of it as one array: a view that ends with `release`, so copy it (as an object store does) to keep it."""
        if self._buffer is None:
            raise CheckpointError("the snapshot was released; its buffer may hold another one by now")
        return self._buffer.view

    def beside(self) -> str | None:
        """Digest of what it has beside the pieces of arrays: equal for ranks where that is equal. None without pieces."""
        if self._beside is None:
            return None
        payload = self.payload()
        digest = hashlib.blake2b(digest_size=16)
        for begin, end in self._beside:
            digest.update(payload[begin:end].data)
        return digest.hexdigest()

    def write(self, storage: Storage, prefix: str) -> list[FileEntry]:
        """Write the part's files; see `write_payload`. For a writer thread: it also readies the pool's other buffers.

        Raises:
            StorageError: Writing went on failing.
        """
        payload = self.payload()
        self._pool.prefault(self.num_bytes)
        return write_payload(payload, storage, prefix)

    def release(self) -> None:
        """Give the buffer back. Must be called, also after a failed write; twice is as once."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.release(buffer)


def take_snapshot(
    state: Any, pool: StagingPool, *, trusted: bool = False, shards: ShardWriter | None = None
) -> Snapshot:
    """Copy a state; when this returns the caller may change it.

    Args:
        state: Any tree of containers, scalars, tensors and things with ``state_dict()``.
        pool: Where the copy goes; waits while its buffers are in use.
        trusted: Pickle what nothing else can hold.
        shards: Takes the pieces that this rank has of arrays; None where it saves for all ranks.

    Raises:
        UnsafeStateError: It has such a leaf, without ``trusted``.
        CheckpointError: It contains itself, nests too deeply, holds a tensor that cannot be saved, or the pool was
            closed.
    """
    leaves = LeafList()
    encoder = Encoder(leaves, trusted=trusted, shards=shards)
    node = encoder.encode_state(state)
    tree, num_state_bytes = encode_tree(node, shards.table if shards is not None else {})
    placed = sorted(leaves.named.items(), key=_by_alignment)
    header = _header(placed)
    num_tensor_bytes = len(header) + sum(leaf.num_bytes for _, leaf in placed)
    pinned = any(leaf.device is not None and leaf.device.type == "cuda" for _, leaf in placed)
    buffer = pool.acquire(num_tensor_bytes + len(tree) + FOOTER_BYTES, pinned=pinned)
    try:
        _fill(buffer.view, header, [leaf for _, leaf in placed], tree)
        write_footer(buffer.view, num_tensor_bytes, len(tree))
        beside = None
        if shards is not None and shards.table:
            beside = _stretches_beside(placed, shards.names, len(header))
            beside.append((num_tensor_bytes, num_tensor_bytes + num_state_bytes))
        return Snapshot(pool, buffer, encoder.num_pickled, beside)
    except BaseException:  # AttemptEnded as well: a buffer that is lost would block the saves of the next attempt
        pool.release(buffer)
        raise


def _stretches_beside(placed: list[tuple[str, Leaf]], pieces: Collection[str], begin: int) -> list[tuple[int, int]]:
    """Where the leaves lie that are no pieces, of those that begin at ``begin``."""
    stretches = []
    for name, leaf in placed:
        if name not in pieces:
            stretches.append((begin, begin + leaf.num_bytes))
        begin += leaf.num_bytes
    return stretches


def _by_alignment(item: tuple[str, Leaf]) -> int:
    """Widest elements first: the format allows no gaps, and so each tensor still lies on a multiple of its width."""
    return -item[1].item_bytes


def _header(placed: list[tuple[str, Leaf]]) -> bytes:
    if not placed:
        return b""
    return encode_header([(name, leaf.dtype, leaf.shape, leaf.num_bytes) for name, leaf in placed], {"format": "pt"})


def _fill(target: ByteArray, header: bytes, leaves: Sequence[Leaf], tree: bytes) -> None:
    end = _put(target, 0, header)
    copies: list[tuple[Leaf, ByteArray]] = []
    for leaf in leaves:
        copies.append((leaf, target[end : end + leaf.num_bytes]))
        end += leaf.num_bytes
    try:
        _copy([each for each in copies if each[0].device is not None], num_threads=1)
        in_memory = [each for each in copies if each[0].device is None]
        _copy(in_memory, num_threads=_num_threads(sum(leaf.num_bytes for leaf, _ in in_memory)))
    finally:  # also on the way out of an error: a late copy from a GPU would land in the buffer's next snapshot
        synchronize(leaves)
    _put(target, end, tree)


def _copy(copies: Sequence[tuple[Leaf, ByteArray]], num_threads: int) -> None:
    if num_threads == 1:
        for leaf, area in copies:
            leaf.fill(leaf.source, area)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="raysgd-copy") as pool:  # leaves when all of them are done
        for done in [pool.submit(leaf.fill, leaf.source, area) for leaf, area in copies]:
            done.result()


def _num_threads(num_bytes: int) -> int:
    """One core cannot read and write as fast as memory can; a few can."""
    if num_bytes < _PARALLEL_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, cores)


def _put(target: ByteArray, start: int, data: bytes) -> int:
    end = start + len(data)
    target.data[start:end] = data
    return end
