"""A worker session, and fakes of everything that it uses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.session.base import Identity
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import Saved, WorkerEvent
from raysgd.session.worker import Codec, WorkerSession


class FakeWriter:
    """Records requested writes; raises a state that is an exception."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, Any]] = []
        self.rank_states: list[dict[str, Any]] = []

    def save(
        self, call: int, state: Any, rank_state: dict[str, Any], *, allow_pickle: bool, shared_by: int | None
    ) -> None:
        if isinstance(state, Exception):
            raise state
        self.calls.append(("state", call, (state, allow_pickle)))
        self.rank_states.append(rank_state)

    def save_files(self, call: int, path: Any, rank_state: dict[str, Any]) -> None:
        self.calls.append(("files", call, path))
        self.rank_states.append(rank_state)

    def save_nothing(self, call: int, rank_state: dict[str, Any]) -> None:
        self.calls.append(("nothing", call, None))
        self.rank_states.append(rank_state)

    def close(self, *, wait_held: bool = False) -> None: ...


@dataclass
class FakeStart:
    """A checkpoint to start from."""

    name: str
    generators: dict[str, Any] = field(default_factory=dict)
    on_unusable: Callable[[Exception], None] | None = None

    def load(
        self, rank: int, world_size: int, *, allow_pickle: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        self.on_unusable = on_unusable
        return (self.name, rank, world_size, allow_pickle), {"generators": self.generators}


class FakeLink:
    """A controller that answers immediately."""

    def __init__(self) -> None:
        self.barriers: list[tuple[str, int, bytes | None]] = []
        self.answer: bytes | None = b""
        self.newest: FakeStart | None = None
        self.listed: list[Checkpoint] = []
        self.questions: list[tuple[int, int]] = []

    def join_barrier(self, what: str, index: int, payload: bytes | None) -> bytes | None:
        self.barriers.append((what, index, payload))
        return payload if payload is not None else self.answer

    def newest_checkpoint(self, index: int, num_saves: int) -> FakeStart | None:
        self.questions.append((index, num_saves))
        return self.newest

    def list_checkpoints(self, index: int, num_saves: int) -> list[Checkpoint]:
        self.questions.append((index, num_saves))
        return self.listed


class Worker:
    """A session with fakes around it."""

    def __init__(self, rank: int = 0, world_size: int = 2, **settings: Any) -> None:
        self.writer = FakeWriter()
        self.link = FakeLink()
        self.event_queue = EventQueue(0)
        given: dict[str, Any] = {"start": None, "time_before_s": 0.0, **settings}
        self.session = WorkerSession(
            Identity(world_rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size),
            event_queue=self.event_queue,
            writer=self.writer,  # type: ignore[arg-type]
            link=self.link,
            codec=Codec(pickle.dumps, pickle.loads),
            seed=None,
            deterministic=False,
            **given,
        )

    def report(self, **metrics: Any) -> None:
        self.session.report(metrics)

    def save(self, state: Any = "state", **options: Any) -> None:
        given = {"files": False, "metrics": None, "all_ranks": False, "allow_pickle": False, **options}
        self.session.save_checkpoint(state, **given)

    def sent(self) -> list[WorkerEvent]:
        return self.event_queue.drain(0)

    def saved(self) -> list[Saved]:
        return [event for event in self.sent() if isinstance(event, Saved)]
