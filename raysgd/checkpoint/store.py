"""The folder of a run's checkpoints: where their files are, when one counts, which are there, which go.

::

    checkpoints/
        checkpoint_000003/
            a0002-r00000.safetensors    part of rank 0, written by its worker in attempt 2
            a0002-r00000.json
            manifest.json               written last, by the control plane: from here on it is a checkpoint

Runs in the control plane (committing, listing, deleting; never imports torch or NumPy) and in drivers (reading).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from raysgd.checkpoint.local_files import TEMPORARY_PREFIX
from raysgd.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.verify import verify_files
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, StorageError

_DIRECTORY = re.compile(r"checkpoint_([0-9]{6}|[1-9][0-9]{6,17})")
_PART = r"a[0-9]{4,}-r[0-9]{5,}(\..+)?"
_TEMPORARY = re.escape(TEMPORARY_PREFIX) + ".*"
_OURS = f"{re.escape(MANIFEST_NAME)}|{_PART}|{_TEMPORARY}"


def part_prefix(attempt: int, rank: int) -> str:
    """How the names of one rank's files begin.

    The attempt in it keeps a worker that was given up from overwriting what a later one wrote.
    """
    return f"a{attempt:04d}-r{rank:05d}"


def directory_name(number: int) -> str:
    return f"checkpoint_{number:06d}"


def _manifest_of(number: int) -> str:
    return f"{directory_name(number)}/{MANIFEST_NAME}"


def read_manifest(checkpoint: Storage | str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint in a folder.

    Raises:
        CheckpointNotFoundError: The folder holds none, or is not there.
        CheckpointCorruptError: It is not valid.
    """
    directory = checkpoint if isinstance(checkpoint, Storage) else Storage.from_uri(checkpoint)
    data = directory.read_bytes(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    return Manifest.from_json(data, directory.path_of(MANIFEST_NAME))


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that could not be used.

    Attributes:
        number: Its number.
        path: Its folder.
        error: Why.
    """

    number: int
    path: str
    error: CheckpointError


@dataclass(frozen=True)
class Scan:
    """What a store holds.

    Attributes:
        manifests: Of the committed checkpoints, oldest first.
        problems: Those whose manifest is not valid.
    """

    manifests: list[Manifest]
    problems: list[PassedOver]


@dataclass(frozen=True)
class Newest:
    """Which checkpoint to go on from.

    Attributes:
        manifest: None where there is no usable one.
        passed_over: Newer ones that could not be used, newest first.
    """

    manifest: Manifest | None
    passed_over: list[PassedOver]


@final
class CheckpointStore:
    """The checkpoints in one folder. Stateless and thread-safe; only one process commits and deletes."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def directory(self, number: int) -> Storage:
        """The folder of a checkpoint, whether it exists or not; workers write their parts there."""
        return self.storage.child(directory_name(number))

    def path(self, number: int) -> str:
        """Path or URI of that folder."""
        return self.directory(number).uri

    def commit(self, manifest: Manifest) -> str:
        """Make the files in the checkpoint's folder a checkpoint, all at once, and return its path.

        Every file the manifest lists must be durable by now. What other attempts left in the folder is removed.

        Raises:
            StorageError: The manifest could not be written; then there is no checkpoint.
        """
        directory = self.directory(manifest.number)
        directory.write_bytes(MANIFEST_NAME, manifest.to_json())
        with contextlib.suppress(CheckpointError):  # rubbish that stays harms nobody
            _remove_unlisted(directory, manifest)
        return directory.uri

    def numbers(self) -> list[int]:
        """Numbers that have a folder, committed or not, in order."""
        found = [int(match[1]) for match in map(_DIRECTORY.fullmatch, self.storage.list_names()) if match]
        return sorted(number for number in found if self._may_be_folder(directory_name(number)))

    def scan(self) -> Scan:
        """Like `list`, with what was passed over."""
        scan = Scan([], [])
        for number in self.numbers():
            try:
                scan.manifests.append(self.read(number))
            except CheckpointNotFoundError:  # not committed
                continue
            except CheckpointError as error:
                scan.problems.append(PassedOver(number, self.path(number), error))
        return scan

    def read(self, number: int) -> Manifest:
        """The manifest of one checkpoint; CheckpointNotFoundError or CheckpointCorruptError."""
        name = _manifest_of(number)  # seen from here, so that a link in place of the folder is not followed
        manifest = Manifest.from_json(self.storage.read_bytes(name, MAX_MANIFEST_BYTES), self.storage.path_of(name))
        if manifest.number != number:
            raise CheckpointCorruptError(f"{self.storage.path_of(name)} is of checkpoint {manifest.number}")
        return manifest

    def newest(self, verify: bool = True) -> Newest:
        """The newest checkpoint whose files are what its manifest says.

        Args:
            verify: Read all files and compare checksums; otherwise only their sizes are looked at.

        Raises:
            StorageError: None could be used, and for at least one that is for want of reading it: going on from nothing
                would throw the run's work away.
        """
        passed_over: list[PassedOver] = []
        for number in reversed(self.numbers()):
            try:
                manifest = self.read(number)
                verify_files(self.directory(number), manifest, checksums=verify)
                return Newest(manifest, passed_over)
            except CheckpointNotFoundError:
                continue
            except CheckpointError as error:
                passed_over.append(PassedOver(number, self.path(number), error))
        for problem in passed_over:
            if isinstance(problem.error, StorageError):
                raise problem.error
        return Newest(None, passed_over)

    def delete(self, number: int) -> None:
        """Delete a checkpoint: its manifest first, so that a half-deleted one is none."""
        self.storage.delete_file(_manifest_of(number))
        self.storage.delete_tree(directory_name(number), _OURS)

    def sweep_uncommitted(self, keep: Collection[int] = ()) -> list[int]:
        """Delete the folders without a manifest, except those in ``keep`` (being written); returns their numbers."""
        return [number for number in self.numbers() if number not in keep and self._sweep(number)]

    def _sweep(self, number: int) -> bool:
        try:
            is_committed = self.storage.exists(_manifest_of(number))
        except CheckpointCorruptError:  # a link, which is not ours to delete
            return False
        return not is_committed and self.storage.delete_tree(directory_name(number), _OURS)

    def _may_be_folder(self, name: str) -> bool:
        try:
            return self.storage.is_folder(name)
        except CheckpointCorruptError:  # a link: whoever reads it is told so
            return True

    def list(self) -> list[Manifest]:
        """Manifests of the committed checkpoints, oldest first, passing over those that are not valid."""
        return self.scan().manifests


def _remove_unlisted(directory: Storage, manifest: Manifest) -> None:
    listed = {entry.name.partition("/")[0] for entries in manifest.parts.values() for entry in entries}
    for name in directory.list_names():
        if name in listed or not re.fullmatch(f"{_PART}|{_TEMPORARY}", name):
            continue
        if directory.is_folder(name):
            directory.delete_tree(name, ".*")
        else:
            directory.delete_file(name)
