"""Reading one rank's part of a checkpoint back: files to state.

``{prefix}.json`` holds the tree (`raysgd.checkpoint.tree`), ``{prefix}.safetensors`` the tensors it refers to. Runs in
workers and drivers. Everything in the files is checked before it is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.checkpoint.leaves import LeafSource
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.shards import KIND
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.strict_json import parse_json
from raysgd.checkpoint.tensor_files import Leaves, read_leaves
from raysgd.checkpoint.tree import NO_SHARDS, Decoder
from raysgd.checkpoint.verify import check_size, mismatch
from raysgd.errors import CheckpointCorruptError

TENSORS_SUFFIX = ".safetensors"
TREE_SUFFIX = ".json"
_FORMAT = "raysgd-state"
_VERSION = 1


def encode_tree(node: Any, shards: Mapping[str, Any] = NO_SHARDS) -> tuple[bytes, int]:
    """The content of the JSON file for a state's node, and its table of shards; and where that table begins."""
    document = _dumps({"format": _FORMAT, "version": _VERSION, "state": node})
    if not shards:
        return document, len(document)
    return b'%b,"%b":%b}' % (document[:-1], KIND.encode(), _dumps(shards)), len(document) - 1


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
    tree, tensors = split_entries(directory, entries)
    text = read_tree(directory, tree, verify=verify)
    leaves = Leaves() if tensors is None else read_leaves(directory, tensors, verify=verify)
    return decode_tree(text, leaves, directory.path_of(tree.name), trusted=trusted)


def decode_tree(text: bytes, leaves: LeafSource, where: str, *, trusted: bool) -> Any:
    """The state of a JSON file's content.

    Args:
        text: The file.
        leaves: The tensors it refers to.
        where: What to call it in messages.
        trusted: Allow pickled leaves.
    """
    return Decoder(leaves, where, trusted=trusted).decode_state(parse_tree(text, where)["state"])


def _dumps(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def parse_tree(text: bytes, where: str) -> dict[str, Any]:
    """The document in a JSON file's content: its ``"state"``, and perhaps ``"shards"``.

    Raises:
        CheckpointCorruptError: It is none of this version.
    """
    document = parse_json(text, where)
    if not isinstance(document, dict) or document.get("format") != _FORMAT or "state" not in document:
        raise CheckpointCorruptError(f"{where} holds no state of raysgd")
    if document.get("version") != _VERSION:
        version = document.get("version")
        raise CheckpointCorruptError(f"{where} has version {version!r:.50}; this raysgd reads version {_VERSION}")
    return document


def split_entries(directory: Storage, entries: Sequence[FileEntry]) -> tuple[FileEntry, FileEntry | None]:
    """The tree and the tensors, if it has any, among the files of a part.

    Raises:
        CheckpointCorruptError: These files are no part.
    """
    found = {
        suffix: entry for entry in entries for suffix in (TENSORS_SUFFIX, TREE_SUFFIX) if entry.name.endswith(suffix)
    }
    if TREE_SUFFIX not in found or len(found) != len(entries):
        names = [entry.name for entry in entries]
        raise CheckpointCorruptError(f"{directory.uri}: these files, which its manifest lists, are no part: {names}")
    return found[TREE_SUFFIX], found.get(TENSORS_SUFFIX)


def read_tree(directory: Storage, entry: FileEntry, *, verify: bool) -> bytes:
    """The content of a part's JSON file.

    Raises:
        CheckpointCorruptError: It is not as listed.
    """
    check_size(directory, entry)
    text = directory.read_bytes(entry.name, entry.size)
    if len(text) != entry.size or (verify and zlib.crc32(text) != entry.crc32):
        raise mismatch(directory, entry)
    return text
