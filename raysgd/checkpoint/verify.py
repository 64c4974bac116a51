"""Whether the files of a checkpoint are what its manifest says. Runs in the control plane and in drivers; no NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

from raysgd.checkpoint.checksum import CHUNK_BYTES, Checksum
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.storage import Storage
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError


def verify_files(directory: Storage, manifest: Manifest, *, checksums: bool) -> None:
    """Check all files of a checkpoint.

    Args:
        directory: Of the checkpoint.
        manifest: Its manifest.
        checksums: Read them and compare checksums; otherwise sizes only.

    Raises:
        CheckpointCorruptError: Names the first file that is missing or does not match.
    """
    for entries in manifest.parts.values():
        verify_entries(directory, entries, checksums=checksums)


def verify_entries(directory: Storage, entries: Iterable[FileEntry], *, checksums: bool) -> None:
    """The same for some of the files."""
    for entry in entries:
        check_size(directory, entry)
        if checksums:
            _check_crc32(directory, entry)


def check_size(directory: Storage, entry: FileEntry) -> None:
    """CheckpointCorruptError unless the file is there and has its size."""
    path = directory.path_of(entry.name)
    try:
        size = directory.size(entry.name)
    except CheckpointNotFoundError as error:
        raise CheckpointCorruptError(f"{path} is missing, though the manifest lists it") from error
    if size != entry.size:
        raise CheckpointCorruptError(f"{path} has {size:,} bytes; the manifest says {entry.size:,}")


def mismatch(directory: Storage, entry: FileEntry) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{directory.path_of(entry.name)} does not match its checksum in the manifest")


def _check_crc32(directory: Storage, entry: FileEntry) -> None:
    if directory.read_with(entry.name, _crc32) != entry.crc32:
        raise mismatch(directory, entry)


def _crc32(stream: BinaryIO) -> int:
    with Checksum() as checksum:
        while chunk := stream.read(CHUNK_BYTES):
            checksum.update(chunk)
        return checksum.result()
