"""Checkpoints of a run in folders of Tune's, which keeps and deletes them as it was told to, whatever the run keeps.

A run in a trial is ahead of Tune, and Tune may want a checkpoint that the run itself would have deleted. So its process
deletes them, as the run's `raysgd.CheckpointConfig` says, when Tune has got them or is past them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.manifest import MANIFEST_NAME
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, read_manifest

_CHUNK_BYTES = 1 << 20


def copy_checkpoint(source: Storage, target: Storage) -> None:
    """Have a checkpoint in another folder too: on a local disk by links to the same bytes, elsewhere by a copy.

    Raises:
        CheckpointNotFoundError: It is there no more.
    """
    entries = [entry for part in read_manifest(source).parts.values() for entry in part]
    for name in [*(entry.name for entry in entries), MANIFEST_NAME]:  # last, so that the copy is whole when it is one
        _copy(source, target, name)


def _copy(source: Storage, target: Storage, name: str) -> None:
    if source.is_local and target.is_local:
        path = target.path_of(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.link(source.path_of(name), path)
            return
        except FileExistsError:
            return
        except OSError:  # two disks, or one that knows no links
            pass
    target.write_chunks(name, lambda: _chunks(source, name))


def _chunks(source: Storage, name: str) -> Iterator[bytes]:
    with source.open_input(name) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


class Pruning:
    """Deletes what a run has saved and is not to keep.

    Args:
        policy: What is to be kept.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._deleted: set[int] = set()

    def prune(self, run_dir: str, checkpoints: Mapping[int, Checkpoint]) -> None:
        """Delete of these, which are known by their numbers, what is not to be kept."""
        known = [_Record(number, found.metrics) for number, found in checkpoints.items() if number not in self._deleted]
        doomed = self._policy.to_delete(known)
        if not doomed:
            return
        store = CheckpointStore(Storage.from_uri(run_dir).child("checkpoints"))
        for number in doomed:
            store.delete(number)
            self._deleted.add(number)


class _Record(NamedTuple):
    number: int
    metrics: Mapping[str, Any]
