"""A state on its way from one process to another: as one part of a checkpoint, with a checksum, and never as a whole copy.

Runs in workers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from raysgd.checkpoint.codecs.frameworks import synchronize
from raysgd.checkpoint.codecs.leaves import ByteArray
from raysgd.checkpoint.codecs.tree import Decoder
from raysgd.checkpoint.format.parts import parse_tree, read_tensors
from raysgd.checkpoint.snapshot import lay_out
from raysgd.checkpoint.storage.files import CHUNK_BYTES, Checksum
from raysgd.errors import CheckpointCorruptError

_SIZES = struct.Struct("!QQ")  # of the tensors and of the tree
_CRC32 = struct.Struct("!II")  # of the tensors and of the tree


def stream_state(state: Any, is_valid: Callable[[], bool] = lambda: True) -> Iterator[memoryview]:
    """Yield the bytes of a state; each chunk is valid until the next one is asked for.

    Args:
        state: The state.
        is_valid: Whether the state was the same all the time, asked at the end; if not, the checksums do not follow.

    Raises:
        UnsafeStateError, CheckpointError: The state contains something that a checkpoint without pickles cannot hold.
    """
    laid_out = lay_out(state)
    yield memoryview(_SIZES.pack(laid_out.num_tensor_bytes, len(laid_out.tree)))
    yield memoryview(laid_out.tree)
    yield memoryview(laid_out.header)
    crc32 = zlib.crc32(laid_out.header)
    scratch: ByteArray = np.empty(max((leaf.num_bytes for leaf in laid_out.leaves), default=0), np.uint8)
    for leaf in laid_out.leaves:
        area = scratch[: leaf.num_bytes]
        try:
            leaf.fill(leaf.source, area)
        finally:
            synchronize([leaf])
        for start in range(0, area.size, CHUNK_BYTES):
            chunk = area.data[start : start + CHUNK_BYTES]
            crc32 = zlib.crc32(chunk, crc32)
            yield chunk
    if is_valid():
        yield memoryview(_CRC32.pack(crc32, zlib.crc32(laid_out.tree)))


def read_state(stream: BinaryIO, where: str) -> Any:
    """Read what `stream_state` yields, each tensor straight to where it stays.

    Raises:
        CheckpointCorruptError: Bytes are missing or wrong.
        OSError: The connection broke.
    """
    num_tensor_bytes, num_tree_bytes = _SIZES.unpack(_read(stream, _SIZES.size, where))
    tree = _read(stream, num_tree_bytes, where)
    with Checksum() as checksum:
        leaves = read_tensors(stream, where, num_tensor_bytes, checksum) if num_tensor_bytes else {}
        found = checksum.result().crc32, zlib.crc32(tree)
    if found != _CRC32.unpack(_read(stream, _CRC32.size, where)):
        raise CheckpointCorruptError(f"{where} does not match its checksums")
    return Decoder(leaves.__getitem__, where).decode_state(parse_tree(tree, where)["state"])


def _read(stream: BinaryIO, num_bytes: int, where: str) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise CheckpointCorruptError(f"{where} ends before its end")
    return data
