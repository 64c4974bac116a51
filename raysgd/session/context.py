"""Which session the functions of `raysgd.session.api` act on: the attempt that runs in this process, or a world of one.

One train_func runs in a process at a time, so the session is a plain module global: threads that user code starts
(data loaders, asynchronous evaluation) see it too, which a thread-local or a context variable would not give them.
"""

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


_current: Session | None = None


def install(session: Session) -> None:
    """Make ``session`` the one of this process."""
    global _current
    _current = session


def uninstall() -> None:
    """Go back to single-machine use."""
    global _current
    _current = None


def installed() -> Session | None:
    """The session that was installed, or None."""
    return _current


def current() -> Session:
    """The session of this process; outside a worker a world of one without data or a place for checkpoints."""
    if _current is not None:
        return _current
    from raysgd.session.local import LocalSession  # a cycle otherwise: LocalSession is a Session

    return LocalSession()
