"""The newest checkpoint that is in the cluster's memory. Pure: part of the run's machine.

It is collected like those on storage, from the same calls, but of parts that are held instead of written.
"""

from __future__ import annotations

from collections.abc import Callable

from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.controller.commands import Command, Hold
from raysgd.controller.commits import CheckpointCollector
from raysgd.controller.shelf import Shelf, Start
from raysgd.session.events import HoldFailed, PartHeld, PartSafe, Saved, Scored


class MemoryTier:
    """One run's.

    Args:
        out: Where commands go.
        on_held: Told the number of a checkpoint that is in memory.
    """

    def __init__(self, out: Callable[[Command], None], on_held: Callable[[int], None]) -> None:
        self._out = out
        self._on_held = on_held
        self._shelf = Shelf(Start(), RetentionPolicy(1))
        self._collector = CheckpointCollector(0, 0, first_number=1, iterations_before=0, reduce={})

    @property
    def newest(self) -> Manifest | None:
        """As it would be on storage, without files."""
        return self._shelf.newest

    def begin_attempt(self, collector: CheckpointCollector) -> None:
        """Collect with ``collector``, which is this one's own."""
        self._shelf.forget_scores()
        self._collector = collector

    def lost(self, number: int) -> None:
        """A checkpoint is in memory no more."""
        self._shelf.drop(number)

    def reported(self, rank: int, count: int) -> None:
        self._collector.reported(rank, count)

    def left(self, rank: int) -> str | None:
        """As of `CheckpointCollector`."""
        rule = self._collector.left(rank)
        self._keep_complete()
        return rule

    def take(self, rank: int, said: Saved | PartSafe | PartHeld | HoldFailed | Scored) -> str | None:
        """An event of a rank; returns the rule it breaks, if it does."""
        rule = None
        if isinstance(said, Saved):
            rule = self._collector.saved(rank, said)
        elif isinstance(said, PartHeld):
            rule = self._collector.part_safe(rank, PartSafe(said.call, (), said.rank_state, said.beside))
        elif isinstance(said, PartSafe):
            if rank != 0 and not said.files:  # it gives no state; a part with files is on storage, which is not here
                rule = self._collector.part_safe(rank, said)
        elif isinstance(said, HoldFailed):
            self._collector.part_failed(said.call)
        else:
            self._collector.scored(rank, said)
        self._keep_complete()
        return rule

    def discard(self, call: int) -> None:
        """The checkpoint of this call is one of files: it is on storage alone."""
        self._collector.discard(call)

    def end_attempt(self) -> None:
        """The attempt is over: what ranks that are gone did not report is not waited for."""
        self._take_scores(is_over=True)

    def _keep_complete(self) -> None:
        for manifest in self._collector.complete():
            self._shelf.add(manifest)
            self._out(Hold(manifest.number))
            self._on_held(manifest.number)
        self._take_scores(is_over=False)

    def _take_scores(self, *, is_over: bool) -> None:
        for score in self._collector.complete_scores(is_over=is_over):
            self._shelf.score(*score)
