"""`Checkpoint`, what users hold, and `load_state`, by which workers read one.

Runs in drivers and workers. A `Checkpoint` is small and picklable: it names the folder and reads it when asked.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from raysgd.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import read_manifest
from raysgd.checkpoint.verify import verify_entries, verify_files
from raysgd.checkpoint.wrong_ranks import not_for
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError


class MemorySource(Protocol):
    """Where a checkpoint that is on no storage comes from; must be picklable."""

    def load(self, rank: int | None, trusted: bool) -> Any:
        """The state of a rank's part."""


@final
class Checkpoint:
    """A saved state of a run. Equal to another of the same path."""

    def __init__(
        self,
        path: str | None,
        metrics: Mapping[str, Any] | None = None,
        iteration: int = 0,
        time_total_s: float = 0.0,
        *,
        source: MemorySource | None = None,
    ) -> None:
        self._path = path
        self._metrics = dict(metrics or {})
        self._iteration = iteration
        self._time_total_s = time_total_s
        self._source = source

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a folder; its manifest and the sizes of its files are checked, checksums when it is loaded.

        Args:
            path: A path, a URI, or a checkpoint of Ray Tune's.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointCorruptError: Names the file that is missing or wrong.
        """
        given: Any = path
        is_tunes = hasattr(given, "filesystem") and hasattr(given, "path")  # duck-typed: this module knows no Ray
        directory = Storage(given.filesystem, given.path) if is_tunes else Storage.from_uri(path)
        try:
            manifest = read_manifest(directory)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"there is no checkpoint at {directory.uri}{_suggest(directory)}") from error
        verify_files(directory, manifest, checksums=False)
        return cls.of_manifest(directory.uri, manifest)

    @classmethod
    def of_manifest(cls, path: str, manifest: Manifest) -> Checkpoint:
        """The checkpoint whose manifest the caller has just read or written."""
        return cls(path, manifest.metrics, manifest.iteration, manifest.time_total_s)

    @property
    def path(self) -> str | None:
        """Its folder, a path or URI; None when it lives in memory only."""
        return self._path

    @property
    def metrics(self) -> dict[str, Any]:
        """What was reported with it."""
        return self._metrics

    @property
    def iteration(self) -> int:
        """``training_iteration`` when it was saved."""
        return self._iteration

    @property
    def time_total_s(self) -> float:
        """Seconds of training that led to it."""
        return self._time_total_s

    def load(self, trusted: bool = False, *, rank: int | None = None) -> Any:
        """The state, with all tensors on the CPU; for one saved with ``files=True`` the path of a local folder.

        Args:
            trusted: Allow pickled leaves, which can run code.
            rank: Whose part of one that was saved with ``all_ranks=True``; rank 0's by default.

        Raises:
            CheckpointCorruptError: Its bytes are not what its manifest says.
            UnsafeStateError: It holds pickles, without ``trusted``.
            ReshardError: It has no part of that rank.
        """
        if self._path is not None:
            directory = Storage.from_uri(self._path)
            return load_state(directory, read_manifest(directory), rank or 0, trusted=trusted)
        if self._source is None:
            raise CheckpointError("this checkpoint has neither a path nor a copy in memory")
        return self._source.load(rank, trusted)

    def __repr__(self) -> str:
        return f"Checkpoint(path={self._path!r}, iteration={self._iteration})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self is other or (self._path is not None and self._path == other._path)

    def __hash__(self) -> int:
        return hash(self._path) if self._path is not None else id(self)


def load_state(
    storage_dir: Storage,
    manifest: Manifest,
    rank: int,
    *,
    trusted: bool,
    verify: bool = True,
    world_size: int | None = None,
    on_unusable: Callable[[Exception], None] = lambda error: None,
) -> Any:
    """The state that a rank gets: its own part where each rank saved one, else the one part for all.

    Arrays that were saved in shards are put together from all parts (`raysgd.checkpoint.resharding`).

    Args:
        storage_dir: The checkpoint's folder.
        manifest: Its manifest.
        rank: World rank of the reader.
        trusted: Allow pickled leaves.
        verify: Compare checksums; sizes always are.
        world_size: Number of ranks that read, where parts must fit it; arrays in shards are then read later, as far as they
            are needed. None: they are whole arrays.
        on_unusable: Told of what is found wrong then.

    Returns:
        The state; for ``is_files`` the path of a local folder: the one on storage if that is local, which must not be
        changed, else a fetched copy that is removed when the process ends.

    Raises:
        ReshardError: The parts were saved by another number of ranks, or there is none for this one.
        CheckpointCorruptError, UnsafeStateError: As for `Checkpoint.load`.
    """
    parts = {rank: part for rank, part in manifest.parts.items() if part}
    if not parts:
        raise CheckpointCorruptError(f"{storage_dir.path_of(MANIFEST_NAME)} lists no parts")
    if manifest.is_files:
        if manifest.all_ranks and (rank not in parts or world_size not in (None, manifest.world_size)):
            raise not_for(storage_dir.uri, parts, rank, manifest.world_size, world_size)
        return _local_folder(storage_dir, parts[rank if manifest.all_ranks else min(parts)], verify=verify)
    if not manifest.all_ranks:
        from raysgd.checkpoint.parts import read_part  # NumPy, which a driver that only lists checkpoints does without

        return read_part(storage_dir, parts[min(parts)], trusted=trusted, verify=verify)
    from raysgd.checkpoint.part_sources import StoredPart
    from raysgd.checkpoint.resharding import load_parts

    return load_parts(
        {rank: StoredPart(storage_dir, files, verify=verify) for rank, files in parts.items()},
        rank,
        saved_by=manifest.world_size,
        is_reshardable=manifest.is_reshardable,
        world_size=world_size,
        where=storage_dir.uri,
        trusted=trusted,
        on_unusable=on_unusable,
    )


def _local_folder(directory: Storage, entries: Sequence[FileEntry], *, verify: bool) -> str:
    folders = {entry.name.partition("/")[0] for entry in entries if "/" in entry.name}
    if len(folders) != 1 or not all("/" in entry.name for entry in entries):
        raise CheckpointCorruptError(f"{directory.path_of(MANIFEST_NAME)}: a part of files is not in one folder")
    folder = folders.pop()
    if directory.is_local:
        verify_entries(directory, entries, checksums=verify)
        return directory.path_of(folder)
    target = tempfile.mkdtemp(prefix="raysgd-checkpoint-")
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    directory.fetch_tree(entries, target, verify=verify)
    return os.path.join(target, folder)


def _suggest(directory: Storage) -> str:
    """The checkpoints just below a folder that is none: a run's folder given by mistake."""
    for below in (directory, directory.child("checkpoints")):
        found = [name for name in below.list_names() if re.fullmatch(r"checkpoint_[0-9]+", name)]
        if found:
            return f"; did you mean {below.path_of(found[-1])}?"
    return f" (it has no {MANIFEST_NAME})" if directory.exists() else ""
