"""Copy a run's checkpoints to folders of Tune, which keeps and deletes its copies by its own settings.

A run is ahead of Tune, which may still want a checkpoint that the run itself would have deleted. So the trial's process
deletes the run's checkpoints, as `raysgd.CheckpointConfig` says, once Tune has them or has newer ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.format.manifest import MANIFEST_NAME
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, read_manifest
from raysgd.errors import ConfigError

_CHUNK_BYTES = 1 << 20
_TEMPORARY = ".tmp-link"


def copy_checkpoint(source: Storage, target: Storage, iteration: int | None = None, metrics: Any = None) -> None:
    """Copy a checkpoint to another folder; on a local disk by hard links to the same bytes.

    Args:
        source: The folder of the checkpoint.
        target: The folder of the copy; what another search left there is replaced.
        iteration: The round of the checkpoint, which its own files may not have yet.
        metrics: The metrics of that round.

    Raises:
        CheckpointNotFoundError: The checkpoint was deleted.
    """
    manifest = read_manifest(source)
    if iteration is not None:
        known = dict(metrics or manifest.metrics)
        manifest = replace(manifest, iteration=iteration, metrics=known, awaits_round=False)
    target.delete_file(MANIFEST_NAME)
    for entry in (entry for part in manifest.parts.values() for entry in part):
        _copy(source, target, entry.name)
    target.write_bytes(MANIFEST_NAME, manifest.to_json())  # last: a folder with a manifest is a whole checkpoint


def uri_of(storage: Storage) -> str:
    """Return the path or URI by which another process opens a folder.

    Raises:
        ConfigError: The file system has settings that a URI does not show.
    """
    if not storage.is_local:
        try:
            is_same = Storage.from_uri(storage.uri).is_on(storage)
        except ConfigError:
            is_same = False
        if not is_same:
            raise ConfigError(
                f"the search's files are on {storage.path_of('')}, which needs settings that the workers do not have. Give "
                "Tune a storage_path that is a path, or a URI without options, and no storage_filesystem; further "
                "settings of the file system can be environment variables, such as AWS_ENDPOINT_URL."
            )
    return storage.uri


def _copy(source: Storage, target: Storage, name: str) -> None:
    if source.is_local and target.is_local:
        path = target.path_of(name)
        temporary = f"{path}{_TEMPORARY}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(OSError):  # two disks, or a disk without hard links
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            os.link(source.path_of(name), temporary)
            os.replace(temporary, path)
            with contextlib.suppress(FileNotFoundError):  # os.replace leaves it if both are the same file
                os.unlink(temporary)
            return
    target.write_chunks(name, lambda: _chunks(source, name))


def _chunks(source: Storage, name: str) -> Iterator[bytes]:
    with source.open_input(name) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


class Pruning:
    """Deletes the checkpoints of a run that its policy does not keep.

    Args:
        policy: Which checkpoints are kept.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._deleted: set[int] = set()

    def prune(self, run_dir: str, checkpoints: Mapping[int, Checkpoint]) -> None:
        """Delete from these checkpoints, by number, those that the policy does not keep."""
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
