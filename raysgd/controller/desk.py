"""The checkpoints of a run, from a rank's call to what is on storage. Pure: part of the run's machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.config import CheckpointConfig
from raysgd.controller import frames
from raysgd.controller.commands import Command, Commit, DeleteCheckpoint, Note, Say
from raysgd.controller.commits import CheckpointCollector, Score
from raysgd.controller.reducing import Reduce
from raysgd.controller.shelf import Shelf, Start
from raysgd.session.events import PartFailed, PartSafe, Saved, Scored


class CheckpointDesk:
    """Collects the parts of the current attempt's checkpoints, commits what is complete, keeps what is to be kept.

    Args:
        uri_of: The folder of a checkpoint, by its number.
        out: Where commands go.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        start: Start,
        reduce: Reduce,
        *,
        uri_of: Callable[[int], str],
        out: Callable[[Command], None],
    ) -> None:
        retention = RetentionPolicy(config.num_to_keep, config.score_attribute, config.score_order)
        self._shelf = Shelf(start, retention)
        self._reduce = reduce
        self._uri_of = uri_of
        self._out = out
        self._in_flight: dict[int, Manifest] = {}
        self._last_number = start.number
        self._first_number = 1
        self._collector = CheckpointCollector(0, 0, first_number=1, iterations_before=0, reduce=reduce)

    @property
    def is_idle(self) -> bool:
        """Whether no commit is on its way to storage."""
        return not self._in_flight

    @property
    def newest_number(self) -> int | None:
        newest = self._shelf.newest
        return None if newest is None else newest.number

    @property
    def newest_uri(self) -> str | None:
        return None if self.newest_number is None else self._uri_of(self.newest_number)

    @property
    def is_bound_to_size(self) -> bool:
        """Whether the newest checkpoint can be gone on from by as many ranks as saved it only."""
        newest = self._shelf.newest
        return newest is not None and newest.all_ranks

    def number_of(self, call: int) -> int:
        """The number of the checkpoint that the ``call``-th saves of the attempt make."""
        return self._first_number + call

    def begin_attempt(self, attempt: int, world_size: int) -> tuple[Start, int]:
        """Where the attempt goes on from, and the number its first save makes."""
        start = self._shelf.start(self._uri_of)
        self._shelf.forget_scores()
        self._first_number = self._last_number + 1
        self._collector = CheckpointCollector(
            attempt,
            world_size,
            first_number=self._first_number,
            iterations_before=start.iteration,
            reduce=self._reduce,
            is_resumed=start.uri is not None,
        )
        return start, self._first_number

    @property
    def last_checkpoint(self) -> str:
        """A sentence on it, for the end of an error."""
        uri = self.newest_uri
        return "It has no checkpoint." if uri is None else f"Its last checkpoint, to go on from, is {uri}."

    def end_attempt(self, iterations_before: int) -> int:
        """The attempt is over; returns how many of its rounds stand, by its newest checkpoint.

        Ranks that are gone will not make the reports that rounds wait for: what the others made is the round.
        """
        self._take_scores(self._collector.complete_scores(is_over=True))
        return max(0, self.newest_iteration() - iterations_before)

    def newest_iteration(self) -> int:
        """The iteration of the newest checkpoint, one that is being committed included; 0 without one."""
        known = [manifest.iteration for manifest in self._in_flight.values()]
        if self._shelf.newest is not None:
            known.append(self._shelf.newest.iteration)
        return max(known, default=0)

    # -- what ranks do --------------------------------------------------------------------------------------------

    def reported(self, rank: int, count: int) -> None:
        self._collector.reported(rank, count)

    def take(self, rank: int, said: Saved | PartSafe | Scored) -> str | None:
        """An event of a rank; returns the rule it breaks, if it does."""
        rule = None
        if isinstance(said, Saved):
            rule = self._collector.saved(rank, said)
        elif isinstance(said, PartSafe):
            rule = self._collector.part_safe(rank, said)
        else:
            self._collector.scored(rank, said)
        self._commit_complete()
        return rule

    def part_failed(self, said: PartFailed) -> str:
        """A part could not be written; returns what to tell."""
        return self.failed(self._collector.part_failed(said.call), said.error)

    def left(self, rank: int) -> str | None:
        """A rank has returned; returns the rule that is broken by what it did not do."""
        rule = self._collector.left(rank)
        self._commit_complete()
        return rule

    # -- what storage does ----------------------------------------------------------------------------------------

    def committed(self, manifest: Manifest) -> None:
        self._in_flight.pop(manifest.number, None)
        shown, doomed = self._shelf.add(manifest)
        data = self._describe(shown)
        self._out(Say(frames.CHECKPOINT, shown.attempt, data=data))
        self._out(Note("checkpoint", data))
        if shown is not manifest:  # its score came while it was being written
            self._out(Commit(shown, amend=True))
        for number in doomed:
            self._out(Say(frames.CHECKPOINT_DELETED, shown.attempt, data={"number": number}))
            self._out(Note("checkpoint_deleted", {"number": number}))
            self._out(DeleteCheckpoint(number))

    def failed(self, number: int, error: str) -> str:
        self._in_flight.pop(number, None)
        message = f"checkpoint {number} could not be written: {error}"
        self._out(Note("warning", {"message": message}))
        return message

    def _commit_complete(self) -> None:
        for manifest in self._collector.complete():
            self._last_number = max(self._last_number, manifest.number)
            self._in_flight[manifest.number] = manifest
            self._out(Commit(manifest))
        self._take_scores(self._collector.complete_scores())

    def _take_scores(self, scores: Sequence[Score]) -> None:
        for score in scores:
            scored = self._shelf.score(*score)
            if scored is not None:
                self._out(Commit(scored, amend=True))
                self._out(Say(frames.CHECKPOINT_SCORED, scored.attempt, data=self._describe(scored)))

    def _describe(self, manifest: Manifest) -> dict[str, Any]:
        return {
            "number": manifest.number,
            "uri": self._uri_of(manifest.number),
            "iteration": manifest.iteration,
            "metrics": manifest.metrics,
        }
