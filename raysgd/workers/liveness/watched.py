"""What an actor needs to be watched by a `raysgd.workers.liveness.own_processes.ProcessWatch`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import ray

_GROUP = "liveness"

T = TypeVar("T")


def answers_while_others_block(method: Callable[..., T]) -> Callable[..., T]:
    """Let a thread of its own answer a method, even while the actor's other methods block."""
    decorated: Callable[..., T] = ray.method(concurrency_group=_GROUP)(method)
    return decorated


class Watched:
    """A base of actors that are watched. Start the actor with `watched_actor`."""

    @answers_while_others_block
    def sign_of_life(self) -> int:
        """Return this process's id."""
        return os.getpid()


class ActorWatch(Protocol):
    """The methods of `raysgd.workers.liveness.own_processes.ProcessWatch` by which actors are watched; documented there."""

    def add(self, name: str, find: Callable[[], Any], *, on_gone: Callable[[], None]) -> None: ...

    def remove(self, name: str) -> int | None: ...


def watched_actor(kind: type) -> Any:
    """Return the Ray actor class ``kind``, with the thread for `Watched.sign_of_life`."""
    options: dict[str, Any] = {"concurrency_groups": {_GROUP: 1}}
    return ray.remote(**options)(kind)
