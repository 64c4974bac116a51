"""Loads what is in a payload, or in the files of one part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.checkpoint.format.parts import MemoryPart, StoredPart
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.storage.storage import Storage


def load_payload(payload: Any, allow_pickle: bool = False) -> Any:
    return MemoryPart(lambda: payload).load(allow_pickle=allow_pickle)


def read_part(storage: Storage, entries: Sequence[FileEntry]) -> Any:
    return StoredPart(storage, entries).load(allow_pickle=False)
