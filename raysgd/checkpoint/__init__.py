"""Checkpoints: their format on storage, how a state becomes one without holding up training, which are kept.

Names resolve on first use: the control plane takes `Storage`, `CheckpointStore`, `Manifest` and `RetentionPolicy` from
here without loading NumPy, and nothing here loads torch before a state holds something of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint, load_state
    from raysgd.checkpoint.inline import decode_small, encode_small
    from raysgd.checkpoint.manifest import FileEntry, Manifest
    from raysgd.checkpoint.retention import RetentionPolicy
    from raysgd.checkpoint.snapshot import Snapshot, StagingPool, load_payload, take_snapshot, write_payload
    from raysgd.checkpoint.storage import Retry, Storage, check_name
    from raysgd.checkpoint.store import CheckpointStore, part_prefix, read_manifest

_HOMES = {
    "checkpoint": ("Checkpoint", "load_state"),
    "inline": ("decode_small", "encode_small"),
    "manifest": ("FileEntry", "Manifest"),
    "retention": ("RetentionPolicy",),
    "snapshot": ("Snapshot", "StagingPool", "load_payload", "take_snapshot", "write_payload"),
    "storage": ("Retry", "Storage", "check_name"),
    "store": ("CheckpointStore", "part_prefix", "read_manifest"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "FileEntry",
    "Manifest",
    "RetentionPolicy",
    "Retry",
    "Snapshot",
    "StagingPool",
    "Storage",
    "check_name",
    "decode_small",
    "encode_small",
    "load_payload",
    "load_state",
    "part_prefix",
    "read_manifest",
    "take_snapshot",
    "write_payload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
