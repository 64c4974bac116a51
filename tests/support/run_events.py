"""The events of a run, as the controller writes them, for tests of what is read out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.result import Event


class RunEvents:
    """Makes the events of a run, as the controller writes them."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.events: list[Event] = []
        self.attempt = 0
        self.kept_s = 0.0  # of training, at the newest checkpoint
        self.emit("run_start", backend="torch")

    def emit(self, kind: str, **data: Any) -> None:
        self.events.append(Event(kind, self.at, data))

    def start(self, size: int, joining_s: float = 1.0) -> None:
        self.at += joining_s
        self.attempt += 1
        for rank in range(size):
            self.emit("worker_up", rank=rank, node=f"node{rank}")
        self.emit("attempt_start", attempt=self.attempt, world_size=size, time_before_s=self.kept_s)

    def enter(self, rank: int) -> None:
        self.emit("entered", rank=rank, attempt=self.attempt, timestamp=self.at)

    def sample(self, rank: int, steps: int, more: Mapping[str, Any] | None = None, **uses: float) -> None:
        self.emit("sample", rank=rank, steps=steps, uses=uses, **(more or {}))

    def leave(self, rank: int, **uses: float) -> None:
        self.emit("left", rank=rank, attempt=self.attempt, uses=uses)
