"""The folder of a run's checkpoints: its layout, and how checkpoints are committed, listed and deleted.

::

    checkpoints/
        checkpoint_000003/
            a0002-r00000.safetensors    rank 0's part, written by its worker in attempt 2
            a0002-r00000.json
            manifest.json               written last and once, by the control plane: this commits the checkpoint
            round.json                  in loops that save before they report: the round of the checkpoint, see `write_round`

Runs in the control plane (committing, listing, deleting; never imports torch or NumPy) and in drivers (reading).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple, final

from raysgd.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, ROUND_NAME, Manifest, verify_files
from raysgd.checkpoint.storage.files import TEMPORARY_PREFIX
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, StorageError

_DIRECTORY = re.compile(r"checkpoint_([0-9]{6}|[1-9][0-9]{6,17})")
_PART = r"a[0-9]{4,}-r[0-9]{5,}(\..+)?"
_TEMPORARY = re.escape(TEMPORARY_PREFIX) + ".*"
_OURS = f"{re.escape(MANIFEST_NAME)}|{re.escape(ROUND_NAME)}|{_PART}|{_TEMPORARY}"


def part_prefix(attempt: int, rank: int) -> str:
    """Return the prefix of the names of one rank's files.

    It contains the attempt, so that a worker of an earlier attempt cannot overwrite the files of a later one.
    """
    return f"a{attempt:04d}-r{rank:05d}"


def directory_name(number: int) -> str:
    return f"checkpoint_{number:06d}"


def _manifest_of(number: int) -> str:
    return f"{directory_name(number)}/{MANIFEST_NAME}"


def read_manifest(directory: Storage) -> Manifest:
    """Read the manifest of the checkpoint in a folder, with its round if that is known.

    Raises:
        CheckpointNotFoundError: The folder does not exist, or holds no manifest.
        CheckpointCorruptError: The manifest is not valid.
    """
    return _read(directory, "")


def _read(storage: Storage, prefix: str) -> Manifest:
    name, round_name = prefix + MANIFEST_NAME, prefix + ROUND_NAME
    manifest = Manifest.from_json(storage.read_bytes(name, MAX_MANIFEST_BYTES), storage.path_of(name))
    if manifest.awaits_round:
        # A damaged file is as good as none: what it holds is in the journal, and the state must not be lost for it.
        with contextlib.suppress(CheckpointNotFoundError, CheckpointCorruptError):
            found = Manifest.from_json(storage.read_bytes(round_name, MAX_MANIFEST_BYTES), round_name)
            known = manifest.number, manifest.attempt, manifest.iteration + 1
            if (found.number, found.attempt, found.iteration) == known:
                return replace(found, parts=manifest.parts, rank_states=manifest.rank_states)
    return manifest


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that cannot be used, and why."""

    number: int
    error: CheckpointError


class Newest(NamedTuple):
    """The checkpoint to resume from.

    Attributes:
        manifest: None if no checkpoint is usable.
        skipped: Newer checkpoints that cannot be used, newest first.
    """

    manifest: Manifest | None
    skipped: list[SkippedCheckpoint]


@final
class CheckpointStore:
    """The checkpoints in one folder. Stateless and thread-safe; only one process commits and deletes."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def directory(self, number: int) -> Storage:
        """Return the folder of a checkpoint, to which workers write their parts; it need not exist."""
        return self.storage.child(directory_name(number))

    def path(self, number: int) -> str:
        """Return the path or URI of a checkpoint's folder."""
        return self.directory(number).uri

    def commit(self, manifest: Manifest) -> str:
        """Commit a checkpoint by writing its manifest, and return its path.

        Every file that the manifest lists must be durable. Files of other attempts in the folder are removed.

        Raises:
            StorageError: The manifest could not be written, so the checkpoint is not committed.
        """
        directory = self.directory(manifest.number)
        directory.write_bytes(MANIFEST_NAME, manifest.to_json())
        listed = {entry.name.partition("/")[0] for entries in manifest.parts.values() for entry in entries}
        with contextlib.suppress(CheckpointError):  # files that stay do no harm
            _remove_unlisted(directory, f"{_PART}|{_TEMPORARY}", listed)
        return directory.uri

    def write_round(self, manifest: Manifest) -> None:
        """Write the round of a committed checkpoint that was saved before it: readers need not look for it in the journal.

        Raises:
            CheckpointError: It could not be written, or the checkpoint was deleted.
        """
        if not self.storage.exists(_manifest_of(manifest.number)):
            raise CheckpointNotFoundError(f"checkpoint {manifest.number} was deleted")
        directory, alone = self.directory(manifest.number), replace(manifest, parts={}, rank_states={})
        directory.write_bytes(ROUND_NAME, alone.to_json())
        with contextlib.suppress(CheckpointError):
            _remove_unlisted(directory, _TEMPORARY)  # of a process that died when it wrote the same

    def numbers(self) -> list[int]:
        """Return the numbers that have a folder, committed or not, in order."""
        found = [int(match[1]) for match in map(_DIRECTORY.fullmatch, self.storage.list_names()) if match]
        return sorted(number for number in found if self._may_be_folder(directory_name(number)))

    def read(self, number: int) -> Manifest:
        """Read the manifest of one checkpoint; CheckpointNotFoundError or CheckpointCorruptError."""
        # Names are relative to the store, so that a link in place of the folder is not followed.
        manifest = _read(self.storage, f"{directory_name(number)}/")
        if manifest.number != number:
            where = self.storage.path_of(_manifest_of(number))
            raise CheckpointCorruptError(f"{where} is the manifest of another checkpoint, {manifest.number}")
        return manifest

    def newest(self) -> Newest:
        """Find the newest checkpoint whose files match its manifest. This reads all its files.

        Raises:
            StorageError: No checkpoint is usable, and at least one could not be read. Starting over would lose the run's
                work.
        """
        skipped: list[SkippedCheckpoint] = []
        for number in reversed(self.numbers()):
            try:
                manifest = self.read(number)
                verify_files(self.directory(number), manifest, checksums=True)
                return Newest(manifest, skipped)
            except CheckpointNotFoundError:
                continue
            except CheckpointError as error:
                skipped.append(SkippedCheckpoint(number, error))
        for each in skipped:
            if isinstance(each.error, StorageError):
                raise each.error
        return Newest(None, skipped)

    def delete(self, number: int) -> None:
        """Delete a checkpoint, its manifest first: a half-deleted folder is then not a checkpoint."""
        self.storage.delete_file(_manifest_of(number))
        self.storage.delete_tree(directory_name(number), _OURS)

    def sweep_uncommitted(self) -> None:
        """Delete the folders without a manifest. Must not be called while workers write checkpoints."""
        for number in self.numbers():
            with contextlib.suppress(CheckpointCorruptError):  # a link, which raysgd did not make
                if not self.storage.exists(_manifest_of(number)):
                    self.storage.delete_tree(directory_name(number), _OURS)

    def _may_be_folder(self, name: str) -> bool:
        try:
            return self.storage.is_folder(name)
        except CheckpointCorruptError:  # a link: reading it raises
            return True

    def list(self, *, needs_newest: bool = False) -> list[Manifest]:
        """Return the manifests of the committed checkpoints, oldest first, without those that cannot be read.

        Args:
            needs_newest: The newest one must not be left out because storage refuses to read it.

        Raises:
            StorageError: ``needs_newest`` is given, and no manifest at least as new could be read.
        """
        manifests: list[Manifest] = []
        for number in reversed(self.numbers()):
            try:
                manifests.append(self.read(number))
            except StorageError:
                if needs_newest and not manifests:
                    raise
            except CheckpointError:  # damaged, or deleted meanwhile
                continue
        return manifests[::-1]


def _remove_unlisted(directory: Storage, pattern: str, listed: Set[str] = frozenset()) -> None:
    for name in directory.list_names():
        if name in listed or not re.fullmatch(pattern, name):
            continue
        if directory.is_folder(name):
            directory.delete_tree(name, ".*")
        else:
            directory.delete_file(name)
