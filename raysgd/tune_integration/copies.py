"""Checkpoints of a run in folders of Tune's, which keeps and deletes them as it was told to, whatever the run keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator

from raysgd.checkpoint.manifest import MANIFEST_NAME
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import read_manifest

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
