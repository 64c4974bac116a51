"""What a session is: the thing the functions of `raysgd.session.api` act on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """Where a worker stands in its group. ``rank`` without a word before it is always the world rank."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


class Session(ABC):
    """What the worker-side functions need of the place they run in.

    Called from the training thread, and from threads the user starts; `should_stop` and `report` may be called from
    any of them, `save_checkpoint`, `barrier` and `broadcast` from one at a time, in the same order on every rank.

    Attributes:
        identity: Ranks and sizes.
        seed: The Trainer's seed, or None.
        deterministic: Whether bit-identical repetition was asked for.
        in_worker: False in single-machine use.
    """

    in_worker: bool = False

    def __init__(self, identity: Identity, *, seed: int | None = None, deterministic: bool = False) -> None:
        self.identity = identity
        self.seed = seed
        self.deterministic = deterministic

    @property
    def world_rank(self) -> int:
        return self.identity.world_rank

    @property
    def world_size(self) -> int:
        return self.identity.world_size

    @property
    def local_rank(self) -> int:
        return self.identity.local_rank

    @property
    def local_world_size(self) -> int:
        return self.identity.local_world_size

    @property
    def node_rank(self) -> int:
        return self.identity.node_rank

    @abstractmethod
    def report(self, metrics: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def save_checkpoint(
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, trusted: bool
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(self, path: Any, *, trusted: bool) -> Any: ...

    @abstractmethod
    def should_stop(self) -> bool: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def broadcast(self, obj: Any) -> Any: ...
