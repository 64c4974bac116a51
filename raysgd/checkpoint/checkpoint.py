"""`Checkpoint`, which users hold, and `load_state`, by which workers load one.

Runs in drivers and workers. A `Checkpoint` is small and picklable: it names its folder and reads it on demand.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from raysgd.checkpoint.codecs.compiled import accept_plain_names
from raysgd.checkpoint.format.manifest import MANIFEST_NAME, Manifest, missing_part_error, verify_entries, verify_files
from raysgd.checkpoint.links import follow
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import read_manifest
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError


@final
@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A saved state of a run. Checkpoints with the same path are equal.

    Attributes:
        path: Its folder, as a path or URI; None if the checkpoint is in memory only.
        metrics: The metrics that were reported with it.
        iteration: ``training_iteration`` when it was saved.
        time_total_s: Seconds of training before it was saved.
    """

    path: str | None
    metrics: dict[str, Any] = field(default_factory=dict, repr=False)
    iteration: int = 0
    time_total_s: float = field(default=0.0, repr=False)

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open the checkpoint in a folder. Its manifest and the sizes of its files are checked; `load` checks checksums.

        Args:
            path: A path, a URI, or a checkpoint of Ray Tune.

        Raises:
            CheckpointNotFoundError: The folder holds no checkpoint.
            CheckpointCorruptError: A file is missing or wrong; the text names it.
        """
        given: Any = path
        is_from_tune = hasattr(given, "filesystem") and hasattr(given, "path")  # duck-typed: this module knows no Ray
        directory = Storage(given.filesystem, given.path) if is_from_tune else Storage.from_uri(path)
        try:
            manifest = read_manifest(directory)
        except CheckpointNotFoundError as error:
            followed = follow(directory)
            if followed is None:
                raise CheckpointNotFoundError(
                    f"there is no checkpoint at {directory.path_of('')}{_suggest(directory)}"
                ) from error
            directory, manifest = followed, read_manifest(followed)
        verify_files(directory, manifest, checksums=False)
        return cls.of_manifest(directory.uri, manifest)

    @classmethod
    def of_manifest(cls, path: str, manifest: Manifest) -> Checkpoint:
        """Make the checkpoint of a manifest that the caller has just read or written."""
        return cls(path, manifest.metrics, manifest.iteration, manifest.time_total_s)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", dict(self.metrics))  # a copy: several readers make one of the same metrics

    def load(self, allow_pickle: bool = False, *, rank: int | None = None) -> Any:
        """Load the state, with all tensors on the CPU; for ``files=True`` return the path of a local folder.

        Args:
            allow_pickle: Allow pickled values, which can run code when loaded.
            rank: The rank whose part is loaded, if it was saved with ``all_ranks=True``; rank 0 by default.

        Raises:
            CheckpointCorruptError: Its files do not match its manifest.
            UnsafeStateError: It holds pickled values, and ``allow_pickle`` is False.
            ReshardError: It has no part of that rank.
        """
        if self.path is None:
            raise CheckpointError(
                f"{self!r} is in memory only: raysgd.load_checkpoint, called in train_func, loads it."
            )
        directory = Storage.from_uri(self.path)
        return load_state(directory, read_manifest(directory), rank or 0, allow_pickle=allow_pickle)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self is other or (self.path is not None and self.path == other.path)

    def __hash__(self) -> int:
        return hash(self.path) if self.path is not None else id(self)


def load_state(
    storage_dir: Storage,
    manifest: Manifest,
    rank: int,
    *,
    allow_pickle: bool,
    world_size: int | None = None,
    on_unusable: Callable[[Exception], None] = lambda error: None,
) -> Any:
    """Load the state for a rank: its own part if each rank saved one, else the one part for all ranks.

    Arrays that were saved in shards are put together from all parts (`raysgd.checkpoint.resharding`).

    Args:
        storage_dir: The checkpoint's folder.
        manifest: Its manifest.
        rank: World rank that loads.
        allow_pickle: Allow pickled leaves.
        world_size: Number of ranks that load. Arrays in shards are then returned as `SavedArray`s, which read on demand.
            None: one process loads alone, and gets whole arrays.
        on_unusable: Called with an error that occurs later, when a `SavedArray` is read.

    Returns:
        The state. For ``is_files`` the path of a local folder: the one on storage if that is local, which must not be
        changed, else a downloaded copy that is removed when the process ends. It is empty if the rank saved no files.

    Raises:
        ReshardError: The parts were saved by another number of ranks, or this rank has none.
        CheckpointCorruptError, UnsafeStateError: As for `Checkpoint.load`.
    """
    parts = {rank: part for rank, part in manifest.parts.items() if part}
    if manifest.is_files:  # a rank that saved an empty folder has no part
        if manifest.all_ranks and (rank >= manifest.world_size or world_size not in (None, manifest.world_size)):
            raise missing_part_error(storage_dir.path_of(""), manifest, range(manifest.world_size), rank, world_size)
        return _local_folder(storage_dir, parts.get(rank if manifest.all_ranks else min(parts, default=0), []))
    if not parts:
        raise CheckpointCorruptError(
            f"{storage_dir.path_of(MANIFEST_NAME)} lists no parts: the checkpoint holds no state"
        )
    accept_plain_names()
    from raysgd.checkpoint.format.parts import StoredPart  # NumPy: a driver that only lists checkpoints needs none
    from raysgd.checkpoint.resharding import load_parts

    return load_parts(
        manifest,
        {rank: StoredPart(storage_dir, files) for rank, files in parts.items()},
        rank,
        world_size=world_size,
        where=storage_dir.path_of(""),
        allow_pickle=allow_pickle,
        on_unusable=on_unusable,
    )


def _local_folder(directory: Storage, entries: Sequence[FileEntry]) -> str:
    if not entries:
        return _temporary_folder()
    folders = {entry.name.partition("/")[0] for entry in entries if "/" in entry.name}
    if len(folders) != 1 or not all("/" in entry.name for entry in entries):
        raise CheckpointCorruptError(f"{directory.path_of(MANIFEST_NAME)}: the files of a part are not in one folder")
    folder = folders.pop()
    if directory.is_local:
        verify_entries(directory, entries, checksums=True)
        return directory.path_of(folder)
    target = _temporary_folder()
    directory.fetch_tree(entries, target)
    return os.path.join(target, folder)


def _temporary_folder() -> str:
    """Make a folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="raysgd-checkpoint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _suggest(directory: Storage) -> str:
    """Suggest a checkpoint below a folder that is not one: the user may have given a run's folder."""
    for below in (directory, directory.child("checkpoints")):
        found = [name for name in below.list_names() if re.fullmatch(r"checkpoint_[0-9]+", name)]
        if found:
            return f"; did you mean {below.path_of(found[-1])}?"
    return f" (it has no {MANIFEST_NAME})" if directory.exists() else ""
