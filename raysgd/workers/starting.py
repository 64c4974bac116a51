"""The state an attempt starts from, and what is done with one that is in the cluster's memory. Worker side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.part_sources import HeldPart
from raysgd.checkpoint.payload import load_payload, write_payload
from raysgd.checkpoint.resharding import load_parts
from raysgd.checkpoint.retry import PATIENT
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import read_manifest
from raysgd.errors import CheckpointNotFoundError
from raysgd.session import rank_state
from raysgd.workers.orders import HeldCheckpoint
from raysgd.workers.pickling import loads


class FromCheckpoint:
    """A committed checkpoint on storage."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def load(
        self, rank: int, world_size: int, *, trusted: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        folder = Storage.from_uri(self._uri)
        manifest = read_manifest(folder)
        state = load_state(folder, manifest, rank, world_size=world_size, trusted=trusted, on_unusable=on_unusable)
        return state, rank_state.inherit(manifest.rank_states, rank, is_same_size=manifest.world_size == world_size)


class FromMemory:
    """A checkpoint in the cluster's memory, which this node has by now; it is a view there, and copied out."""

    def __init__(self, held: HeldCheckpoint) -> None:
        self._held = held

    def load(
        self, rank: int, world_size: int, *, trusted: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        manifest, parts = self._held.manifest, self._held.parts
        if manifest.all_ranks:
            state = load_parts(
                {rank: HeldPart(partial(self._get, part)) for rank, part in parts.items()},
                rank,
                saved_by=manifest.world_size,
                is_reshardable=manifest.is_reshardable,
                world_size=world_size,
                where=f"checkpoint {manifest.number}",
                trusted=trusted,
                on_unusable=on_unusable,
            )
        else:
            state = load_payload(self._get(parts[min(parts)]), trusted=trusted)
        return state, rank_state.inherit(manifest.rank_states, rank, is_same_size=manifest.world_size == world_size)

    def _get(self, part: Any) -> Any:
        try:
            return ray.get(part)
        except RayError as error:
            number = self._held.manifest.number
            raise CheckpointNotFoundError(f"checkpoint {number} is in memory no more: {error}") from error


class FromState:
    """A state given to ``run(checkpoint=...)``."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def load(
        self, rank: int, world_size: int, *, trusted: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        return loads(self._blob), {}


def store_part(part: Any, folder: str, prefix: str) -> list[FileEntry]:
    """Write a part that is in the cluster's memory to a checkpoint's folder.

    Raises:
        StorageError: Writing went on failing.
    """
    return write_payload(ray.get(part), Storage.from_uri(folder, retry=PATIENT), prefix)
