"""Writes a checkpoint that ranks saved in shards as one part with whole arrays. In any process, without Ray."""

from __future__ import annotations

from dataclasses import replace

from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.errors import CheckpointError, ConfigError
from raysgd.session.events import PartFailed, PartSafe, WorkerEvent
from raysgd.session.saving import CheckpointWriter


def merge_parts(folder: Storage, manifest: Manifest, target: Storage, *, allow_pickle: bool) -> str:
    """Write a checkpoint with whole arrays in one part; return its path.

    Args:
        folder: The checkpoint's folder.
        manifest: Its manifest.
        target: Where the folder of the merged checkpoint is made.
        allow_pickle: Allow pickled values.

    Raises:
        ConfigError: It has nothing to merge, or its ranks saved different values.
        CheckpointError: It cannot be read or written.
    """
    place = folder.path_of("")
    if manifest.is_files:
        raise ConfigError(f"{place} was saved with files=True: it holds files of yours, which cannot be merged.")
    if manifest.all_ranks and manifest.world_size > 1 and not manifest.is_reshardable:
        raise ConfigError(
            f"{place} was saved with all_ranks=True, and its ranks saved different values: one part cannot hold them. Load "
            "each by raysgd.Checkpoint.from_path(...).load(rank=...)."
        )
    store = CheckpointStore(target)
    if store.directory(manifest.number).exists():
        raise ConfigError(f"{store.path(manifest.number)} exists; give another folder.")
    state = load_state(folder, manifest, 0, allow_pickle=allow_pickle)
    events: list[WorkerEvent] = []
    pool = StagingPool(num_buffers=1)
    writer = CheckpointWriter(store, attempt=1, rank=0, first_number=manifest.number, pool=pool, put=events.append)
    writer.save(0, state, {}, allow_pickle=allow_pickle or manifest.allow_pickle)
    writer.close()
    part = next(event for event in events if isinstance(event, (PartSafe, PartFailed)))
    if isinstance(part, PartFailed):
        raise CheckpointError(f"the merged checkpoint could not be written: {part.error}")
    return store.commit(
        replace(manifest, attempt=1, all_ranks=False, is_reshardable=False, parts={0: list(part.files)})
    )
