"""The state an attempt starts from. Worker side."""

from __future__ import annotations

from typing import Any

from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import read_manifest
from raysgd.session import rank_state
from raysgd.workers.pickling import loads


class FromCheckpoint:
    """A committed checkpoint on storage."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def load(self, rank: int, world_size: int, *, trusted: bool) -> tuple[Any, dict[str, Any]]:
        folder = Storage.from_uri(self._uri)
        manifest = read_manifest(folder)
        state = load_state(folder, manifest, rank, world_size=world_size, trusted=trusted)
        return state, rank_state.inherit(manifest.rank_states, rank, is_same_size=manifest.world_size == world_size)


class FromState:
    """A state given to ``run(checkpoint=...)``."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def load(self, rank: int, world_size: int, *, trusted: bool) -> tuple[Any, dict[str, Any]]:
        return loads(self._blob), {}
