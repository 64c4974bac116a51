"""The bytes of one rank's part: tensors file, JSON file and a footer that says where one ends and the other begins.

A payload lies in one array, so that it can be staged, handed to an object store of the cluster, and written to storage
without another copy: the two files are slices of it. Runs in workers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from raysgd.checkpoint.checksum import CHUNK_BYTES
from raysgd.checkpoint.leaves import ByteArray
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.parts import TENSORS_SUFFIX, TREE_SUFFIX, decode_tree
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.tensor_files import Leaves, copy_leaves
from raysgd.errors import CheckpointCorruptError

_FOOTER = struct.Struct("<QQ8s")
_MAGIC = b"raysgd-1"
FOOTER_BYTES = _FOOTER.size
WHERE = "a checkpoint in memory"


def write_footer(payload: ByteArray, num_tensor_bytes: int, num_tree_bytes: int) -> None:
    """Complete a payload whose two files are in place."""
    payload[-FOOTER_BYTES:] = np.frombuffer(_FOOTER.pack(num_tensor_bytes, num_tree_bytes, _MAGIC), np.uint8)


def write_payload(payload: ByteArray, storage: Storage, prefix: str) -> list[FileEntry]:
    """Write the files of a payload, ``{prefix}.safetensors`` (if it has tensors) and ``{prefix}.json``.

    Blocks until they are durable. The payload must not change meanwhile.

    Raises:
        StorageError: Writing went on failing.
    """
    tensors, tree = split_payload(payload)
    files = [(prefix + TENSORS_SUFFIX, tensors)] if tensors.size else []
    files.append((prefix + TREE_SUFFIX, tree))
    return [FileEntry(name, *storage.write_chunks(name, _chunks_of(data))) for name, data in files]


def load_payload(payload: Any, trusted: bool = False) -> Any:
    """The state of a payload.

    Args:
        payload: uint8 array, or bytes; tensors are copied out of it.
        trusted: Allow pickled leaves.
    """
    data = np.frombuffer(payload, np.uint8) if not isinstance(payload, np.ndarray) else payload
    tensors, tree = split_payload(data)
    leaves = copy_leaves(tensors, WHERE) if tensors.size else Leaves()
    return decode_tree(tree.tobytes(), leaves, WHERE, trusted=trusted)


def split_payload(payload: ByteArray) -> tuple[ByteArray, ByteArray]:
    """The two files in a payload: tensors (empty where there are none), and tree."""
    if payload.dtype != np.uint8 or payload.ndim != 1 or payload.size < FOOTER_BYTES:
        raise CheckpointCorruptError(f"{WHERE} is no array of bytes with a footer")
    num_tensor_bytes, num_tree_bytes, magic = _FOOTER.unpack(payload[-FOOTER_BYTES:].tobytes())
    if magic != _MAGIC or num_tensor_bytes + num_tree_bytes + FOOTER_BYTES != payload.size:
        raise CheckpointCorruptError(f"{WHERE} has a footer that does not fit it")
    return payload[:num_tensor_bytes], payload[num_tensor_bytes : num_tensor_bytes + num_tree_bytes]


def _chunks_of(data: ByteArray) -> Any:
    view = data.data

    def chunks() -> Iterator[memoryview]:
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]

    return chunks
