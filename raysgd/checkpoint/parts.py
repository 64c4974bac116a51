"""Reading one rank's part of a checkpoint back: files to state.

``{prefix}.json`` holds the tree (`raysgd.checkpoint.tree`), ``{prefix}.safetensors`` the tensors it refers to. Runs in
workers and drivers. Everything in the files is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from raysgd.checkpoint.leaves import ByteArray, StoredLeaf
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.strict_json import parse_json
from raysgd.checkpoint.tensors import decode_header
from raysgd.checkpoint.tree import Decoder
from raysgd.checkpoint.verify import check_size, mismatch
from raysgd.errors import CheckpointCorruptError

TENSORS_SUFFIX = ".safetensors"
TREE_SUFFIX = ".json"
_FORMAT = "raysgd-state"
_VERSION = 1


def encode_tree(node: Any) -> bytes:
    """The content of the JSON file for a state's node."""
    return json.dumps(
        {"format": _FORMAT, "version": _VERSION, "state": node}, separators=(",", ":"), allow_nan=False
    ).encode()


def read_part(directory: Storage, entries: Sequence[FileEntry], *, trusted: bool, verify: bool = True) -> Any:
    """The state in the files of one part.

    Args:
        directory: Of the checkpoint.
        entries: The part's files, as the manifest lists them.
        trusted: Allow pickled leaves.
        verify: Compare checksums; sizes always are.

    Raises:
        CheckpointCorruptError: A file is missing, or not what the manifest or its own structure says.
        UnsafeStateError: It holds pickles, without ``trusted``.
    """
    by_suffix = {
        suffix: entry for entry in entries for suffix in (TENSORS_SUFFIX, TREE_SUFFIX) if entry.name.endswith(suffix)
    }
    if TREE_SUFFIX not in by_suffix or len(by_suffix) != len(entries):
        raise CheckpointCorruptError(
            f"{directory.uri}: the manifest lists no such part: {[entry.name for entry in entries]}"
        )
    tree = by_suffix[TREE_SUFFIX]
    tensors = by_suffix.get(TENSORS_SUFFIX)
    data = None if tensors is None else read_file(directory, tensors, verify=verify)
    text = read_file(directory, tree, verify=verify).tobytes()
    return decode_part(text, data, directory.path_of(tree.name), trusted=trusted)


def read_file(directory: Storage, entry: FileEntry, *, verify: bool) -> ByteArray:
    """A whole file in a buffer of its own, once its size was found right."""
    check_size(directory, entry)
    data = np.empty(entry.size, np.uint8)
    crc32 = directory.read_into(entry.name, data.data)
    if verify and crc32 != entry.crc32:
        raise mismatch(directory, entry)
    return data


def decode_part(text: bytes, tensors: ByteArray | None, where: str, *, trusted: bool) -> Any:
    """The state of a part that is in memory.

    Args:
        text: The JSON file.
        tensors: The tensors file, writable: tensors become views on it.
        where: What to call it in messages.
        trusted: Allow pickled leaves.
    """
    document = parse_json(text, where)
    if not isinstance(document, dict) or document.get("format") != _FORMAT or "state" not in document:
        raise CheckpointCorruptError(f"{where} holds no state of raysgd")
    if document.get("version") != _VERSION:
        raise CheckpointCorruptError(
            f"{where} has version {document.get('version')!r}; this raysgd reads version {_VERSION}"
        )
    return Decoder(TensorFile(tensors, where), where, trusted=trusted).decode_state(document["state"])


class TensorFile:
    """The leaves in a tensors file, as a `LeafSource`."""

    def __init__(self, data: ByteArray | None, where: str) -> None:
        self._data = data
        self._specs = {} if data is None else decode_header(data.data, where.removesuffix(TREE_SUFFIX) + TENSORS_SUFFIX)

    def get(self, reference: Any) -> StoredLeaf:
        spec = self._specs[reference]
        assert self._data is not None, "a file without data has no specs"
        return StoredLeaf(spec.dtype, spec.shape, self._data[spec.begin : spec.end])
