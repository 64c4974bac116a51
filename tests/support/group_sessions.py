"""A worker's session in the processes of a `RankGroup`: checkpoints of all ranks are written and committed as in a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.codecs.shards import ShardWriter
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.local import LocalSession


class GroupSession(LocalSession):
    """The session of a rank, whose collectives go through the process group; ``folder`` is where checkpoints go."""

    def __init__(self, folder: Path, workers_per_replica: int) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.identity = Identity(rank, size, rank, size, workers_per_replica=workers_per_replica)
        self.in_worker = True
        self._group_store = CheckpointStore(Storage.from_uri(folder))

    def gather(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, obj)
        return gathered

    def save_checkpoint(
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, allow_pickle: bool
    ) -> None:
        rank, size = self.identity.world_rank, self.world_size
        number = max(self.gather(max(self._group_store.numbers(), default=0))) + 1
        found = None
        if all_ranks or rank == 0:
            snapshot = take_snapshot(state, StagingPool(1), shards=ShardWriter(size) if all_ranks else None)
            found = (
                snapshot.write(self._group_store.directory(number), part_prefix(1, rank)),
                snapshot.unsharded_digest(),
            )
        written = {rank: each for rank, each in enumerate(self.gather(found)) if each is not None}
        if rank:
            dist.barrier()
            return
        digests = {digest for _, digest in written.values()}
        self._group_store.commit(
            Manifest(
                number=number,
                attempt=1,
                iteration=1,
                time_total_s=1.0,
                created_s=time.time(),
                world_size=size,
                all_ranks=all_ranks,
                parts={rank: files for rank, (files, _) in written.items()},
                is_reshardable=len(digests) == 1 and None not in digests,
            )
        )
        dist.barrier()

    def load_checkpoint(self, path: Any, *, allow_pickle: bool) -> Any:
        if path is not None:
            return super().load_checkpoint(path, allow_pickle=allow_pickle)
        if not (manifests := self._group_store.list()):
            return None
        newest = manifests[-1]
        directory = self._group_store.directory(newest.number)
        return load_state(
            directory, newest, self.identity.world_rank, allow_pickle=allow_pickle, world_size=self.world_size
        )


@contextmanager
def group_session(folder: Path, workers_per_replica: int = 1) -> Iterator[GroupSession]:
    session = GroupSession(folder, workers_per_replica)
    context.install(session)
    try:
        yield session
    finally:
        context.uninstall()
