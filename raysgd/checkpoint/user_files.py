"""Files the user wrote (``save_checkpoint(path, files=True)``): copied to storage as they are, and brought back.

Runs in workers (both ways) and in drivers (reading).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

from raysgd.checkpoint.checksum import CHUNK_BYTES, Checksum
from raysgd.checkpoint.names import FileEntry, check_name, check_relative_path
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from raysgd.checkpoint.storage import Storage


def put_path(storage: Storage, local_path: str | os.PathLike[str], name: str) -> list[FileEntry]:
    """Copy a file, or all files of a folder, to ``name/`` in ``storage``.

    Links to files are followed, since the user made them; links to folders, sockets and the like are refused.
    Empty folders are not kept.

    Raises:
        CheckpointNotFoundError: There is nothing at ``local_path``.
        CheckpointError: It holds no files, or something that is no file.
    """
    check_name(name, "folder")
    source = os.path.abspath(os.path.expanduser(os.fspath(local_path)))
    if not os.path.exists(source):
        raise CheckpointNotFoundError(f"save_checkpoint(files=True): there is nothing at {source}")
    found = sorted(_walk(source)) if os.path.isdir(source) else [(os.path.basename(source), source)]
    if not found:
        raise CheckpointError(f"save_checkpoint(files=True): the folder {source} holds no files")
    return [_put_file(storage, path, f"{name}/{check_relative_path(relative, 'file')}") for relative, path in found]


def fetch_tree(
    storage: Storage, entries: Sequence[FileEntry], local_dir: str | os.PathLike[str], *, verify: bool = True
) -> None:
    """Copy ``entries`` from storage to ``local_dir``, keeping their relative names."""
    for entry in entries:
        check_relative_path(entry.name, "file")
        target = os.path.join(os.fspath(local_dir), entry.name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        size, crc32 = storage.read_with(entry.name, functools.partial(_copy, target))
        if size != entry.size or (verify and crc32 != entry.crc32):
            raise CheckpointCorruptError(f"{storage.path_of(entry.name)} does not match its manifest (size or crc32)")


def read_chunks(path: str) -> Iterator[bytes]:
    """A local file in chunks; each is a buffer of its own, since the checksum thread lags behind."""
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _walk(folder: str) -> Iterator[tuple[str, str]]:
    """(relative name, path) of each file below ``folder``."""
    for here, folders, files in os.walk(folder, onerror=_raise):
        for name in folders + files:
            path = os.path.join(here, name)
            if os.path.isfile(path):
                yield os.path.relpath(path, folder), path
            elif not os.path.isdir(path) or os.path.islink(path):
                raise CheckpointError(
                    f"save_checkpoint(files=True): {path} is neither a file nor a real folder; leave it out"
                )


def _raise(error: OSError) -> None:
    raise error


def _put_file(storage: Storage, path: str, name: str) -> FileEntry:
    size, crc32 = storage.write_chunks(name, lambda: read_chunks(path))
    return FileEntry(name, size, crc32)


def _copy(target: str, stream: BinaryIO) -> tuple[int, int]:
    size = 0
    with open(target, "wb") as out, Checksum() as checksum:
        while chunk := stream.read(CHUNK_BYTES):
            checksum.update(chunk)
            out.write(chunk)
            size += len(chunk)
        return size, checksum.result()
