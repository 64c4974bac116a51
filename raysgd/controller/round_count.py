"""Counts rounds as their reports come in, without looking into them: when one is whole, readers are told. Pure."""

from __future__ import annotations

from raysgd.controller import frames
from raysgd.controller.frames import Frame


class RoundCount:
    """How far the ranks of an attempt have come. A frame costs it the same whatever the number of ranks."""

    def __init__(self) -> None:
        self._attempt = 0
        self._iterations_before = 0
        self._counts: list[int] = []
        self._running: set[int] = set()
        self._whole = 0  # rounds that every running rank has made
        self._missing = 0  # running ranks that have not made the next one

    @property
    def iteration(self) -> int:
        """The last round that is whole, counted from the run's beginning."""
        return self._iterations_before + self._whole

    def feed(self, frame: Frame) -> bool:
        """Take the next frame; whether a reader should have it at once: all but reports of a round still incomplete."""
        if frame.kind == frames.REPORTS:
            return self._reported(frame)
        if frame.kind == frames.ATTEMPT:
            self._attempt = frame.attempt
            self._iterations_before = frame.data.get("iterations_before", 0)
            self._counts = [0] * frame.data["world_size"]
            self._running = set(range(frame.data["world_size"]))
            self._count()
        elif frame.kind == frames.RANK_DONE and frame.attempt == self._attempt:
            self._running.discard(frame.rank)
            self._count()
        return True

    def _reported(self, frame: Frame) -> bool:
        if frame.attempt != self._attempt or frame.rank not in self._running:
            return True
        before = self._counts[frame.rank]
        self._counts[frame.rank] = before + frame.data["count"]
        if before > self._whole or self._counts[frame.rank] <= self._whole:
            return False
        self._missing -= 1
        if self._missing:
            return False
        self._count()
        return True

    def _count(self) -> None:
        counts = [self._counts[rank] for rank in self._running]
        self._whole = min(counts, default=0)
        self._missing = counts.count(self._whole)
