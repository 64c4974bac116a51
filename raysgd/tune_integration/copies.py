"""Checkpoints of a run in folders of Tune's, which keeps and deletes them as it was told to, whatever the run keeps.

A run in a trial is ahead of Tune, and Tune may want a checkpoint that the run itself would have deleted. So its process
deletes them, as the run's `raysgd.CheckpointConfig` says, when Tune has got them or is past them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.manifest import MANIFEST_NAME
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, read_manifest
from raysgd.errors import ConfigError

_CHUNK_BYTES = 1 << 20
_BESIDE = ".tmp-link"


def copy_checkpoint(source: Storage, target: Storage, iteration: int | None = None, metrics: Any = None) -> None:
    """Have a checkpoint in another folder too: on a local disk by links to the same bytes, elsewhere by a copy.

    Args:
        source: Its folder.
        target: The other one; what another search left there is replaced.
        iteration: The round it belongs to, where its own files may not tell yet.
        metrics: What was reported in that.

    Raises:
        CheckpointNotFoundError: It is there no more.
    """
    manifest = read_manifest(source)
    if iteration is not None:
        manifest = replace(manifest, iteration=iteration, metrics=dict(metrics or manifest.metrics))
    target.delete_file(MANIFEST_NAME)
    for entry in (entry for part in manifest.parts.values() for entry in part):
        _copy(source, target, entry.name)
    target.write_bytes(MANIFEST_NAME, manifest.to_json())  # last, so that the copy is whole when it is one


def uri_of(storage: Storage) -> str:
    """The path or URI by which another process opens a folder.

    Raises:
        ConfigError: Its file system has settings that a URI does not tell.
    """
    if not storage.is_local:
        try:
            is_all = Storage.from_uri(storage.uri).is_on(storage)
        except ConfigError:
            is_all = False
        if not is_all:
            raise ConfigError(
                f"the search's files are on {storage.uri}, which needs settings that the workers do not know. Give Tune a "
                "storage_path that is a path, or a URI without options, and no storage_filesystem; what the file system "
                "needs beside that can be in the environment, such as AWS_ENDPOINT_URL."
            )
    return storage.uri


def _copy(source: Storage, target: Storage, name: str) -> None:
    if source.is_local and target.is_local:
        path = target.path_of(name)
        beside = f"{path}{_BESIDE}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(OSError):  # two disks, or one that knows no links
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            os.link(source.path_of(name), beside)
            os.replace(beside, path)
            with contextlib.suppress(FileNotFoundError):  # it stays where both are the same file
                os.unlink(beside)
            return
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
