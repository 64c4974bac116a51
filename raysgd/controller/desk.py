"""The checkpoints of a run, from a rank's call to what is on storage and in memory. Pure: part of the run's machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.controller import frames
from raysgd.controller.commands import (
    Command,
    Commit,
    DeleteCheckpoint,
    HeldLost,
    HeldNotStored,
    HeldStored,
    Note,
    Say,
    StoreHeld,
)
from raysgd.controller.commits import CheckpointCollector, Score
from raysgd.controller.memory_tier import MemoryTier
from raysgd.controller.past import Past
from raysgd.controller.plan import RunPlan
from raysgd.controller.shelf import Shelf, Start
from raysgd.session.events import HoldFailed, PartFailed, PartHeld, PartSafe, Saved, Scored


class CheckpointDesk:
    """Collects the parts of the current attempt's checkpoints, commits what is complete, keeps what is to be kept.

    Args:
        uri_of: The folder of a checkpoint, by its number.
        out: Where commands go.
        on_held: Told the number of a checkpoint that is in memory, from where training can go on.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        uri_of: Callable[[int], str],
        out: Callable[[Command], None],
        on_held: Callable[[int], None] = lambda number: None,
    ) -> None:
        config = plan.checkpoint
        retention = RetentionPolicy(config.num_to_keep, config.score_attribute, config.score_order)
        self._shelf = Shelf(plan.start, retention)
        self._reduce = plan.reduce
        self._uri_of = uri_of
        self._out = out
        self._memory = MemoryTier(out, on_held) if config.keep_in_memory else None
        self._stored_every = max(1, config.memory_only_between)
        self._in_flight: dict[int, Manifest] = {}
        self._storing: set[int] = set()  # from memory
        self._tried: set[int] = set()  # those that are and were
        self._from_memory: set[int] = set()  # those that could be
        self._last_number = plan.start.number
        self._last_told = plan.start.number  # to readers, as being saved
        self._first_number = 1
        self._attempt = 0
        self._saves_first: bool | None = None
        self._started_from = plan.start
        self._collector = CheckpointCollector(0, 0, first_number=1, iterations_before=0, reduce=plan.reduce)

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
    def newest_held(self) -> Manifest | None:
        """The checkpoint in memory, if that is what the next attempt would go on from."""
        held = None if self._memory is None else self._memory.newest
        return held if held is not None and held.number >= (self.newest_number or 0) else None

    @property
    def has_unstored(self) -> bool:
        """Whether the next attempt would go on from a checkpoint that is in memory alone."""
        held = self.newest_held
        return held is not None and held.number > (self.newest_number or 0)

    @property
    def is_bound_to_size(self) -> bool:
        """Whether the newest checkpoint can be gone on from by as many ranks as saved it only."""
        newest = self.newest_held or self._shelf.newest
        return newest is not None and newest.all_ranks and not newest.is_reshardable

    def go_on(self, past: Past) -> None:
        """Take over what an earlier process of the controller left on storage; readers hear of what they may not know."""
        self._last_number = max(self._last_number, past.last_number)
        for manifest in past.manifests:
            if manifest.number in past.known:
                self._let_go(manifest.attempt, self._shelf.add(manifest)[1])
            else:
                self.committed(manifest)

    def number_of(self, call: int) -> int:
        """The number of the checkpoint that the ``call``-th saves of the attempt make."""
        return self._first_number + call

    def begin_attempt(
        self, attempt: int, world_size: int, reached: tuple[int, float] | None = None
    ) -> tuple[Start, int]:
        """Where the attempt goes on from, and the number its first save makes.

        Args:
            attempt: Its number.
            world_size: Its ranks.
            reached: The iterations and seconds it goes on from, where these are not the checkpoint's.
        """
        start = self._start()
        if reached is not None:
            start = replace(start, iteration=reached[0], time_total_s=reached[1])
        self._shelf.forget_scores()
        self._last_number = max(
            self._last_number, start.number
        )  # one in memory may be written yet: its number is taken
        self._first_number = self._last_number + 1
        self._last_told = self._last_number  # a number that came to nothing is another save's now

        def collector() -> CheckpointCollector:
            return CheckpointCollector(
                attempt,
                world_size,
                first_number=self._first_number,
                iterations_before=start.iteration,
                reduce=self._reduce,
                is_resumed=start.is_checkpoint,
            )

        self._attempt, self._started_from, self._saves_first = attempt, start, None
        self._collector = collector()
        if self._memory is not None:
            self._memory.begin_attempt(collector())
        if start.held is not None and start.number % self._stored_every == 0:
            self.store_held()  # it was on its way to storage
        return start, self._first_number

    def store_held(self) -> bool:
        """Have the newest checkpoint written to storage from memory, once, if it is not there; whether one is being written."""
        held = self.newest_held
        if held is not None and held.number > max([self.newest_number or 0, *self._in_flight, *self._tried]):
            self._tried.add(held.number)
            self._storing.add(held.number)
            self._shelf.forget_scores([held.number])  # it has been scored in memory by those
            self._out(StoreHeld(held))
        return bool(self._storing)

    def take_held(self, said: HeldLost | HeldStored | HeldNotStored) -> None:
        """What has become of a checkpoint in memory."""
        if isinstance(said, HeldStored):
            self._storing.discard(said.manifest.number)
            self._from_memory.add(said.manifest.number)
            self._commit(said.manifest)
        elif isinstance(said, HeldNotStored):
            self._storing.discard(said.number)
            self._out(Say(frames.NOT_SAVED, self._attempt, data={"number": said.number}))
            message = f"checkpoint {said.number} is in memory alone and could not be written to storage: {said.error}"
            self._out(Note("warning", {"message": message}))
        elif self._memory is not None:
            self._memory.lost(said.number)
            self._out(Note("warning", {"message": f"checkpoint {said.number} is no longer in the cluster's memory"}))

    def pass_over(self, error: str) -> str | None:
        """The checkpoint that the attempt started from is of no use: have the next start from the one before.

        Returns:
            What the attempt is to be ended for; None where there is no other, so that the error stands.
        """
        number = self._started_from.number
        if self._started_from.held is not None and self._memory is not None:
            self._memory.lost(number)
        elif self._shelf.has_older_than(number):
            self._shelf.drop(number)
        else:
            return None
        why = f"checkpoint {number} passed over: {error}"
        self._out(Note("warning", {"message": why}))
        return why

    def _start(self) -> Start:
        start, held = self._shelf.start(self._uri_of), self.newest_held
        if held is None:
            return start
        uri = start.uri if start.number == held.number else None
        return Start(uri, held.iteration, held.time_total_s, held.number, held)

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
        if self._memory is not None:
            self._memory.end_attempt()
        return max(0, self.newest_iteration() - iterations_before)

    @property
    def num_rounds(self) -> int:
        """Rounds that all ranks have made in this attempt, or in the last one."""
        return self._collector.num_rounds

    def newest_iteration(self) -> int:
        """The iteration of the newest checkpoint, one that is being committed included; 0 without one."""
        known = [*self._in_flight.values(), self._shelf.newest, self.newest_held]
        return max((manifest.iteration for manifest in known if manifest is not None), default=0)

    # -- what ranks do --------------------------------------------------------------------------------------------

    def reported(self, rank: int, count: int) -> None:
        self._collector.reported(rank, count)
        if self._memory is not None:
            self._memory.reported(rank, count)

    def take(self, rank: int, said: Saved | PartSafe | PartHeld | HoldFailed | Scored) -> str | None:
        """An event of a rank; returns the rule it breaks, if it does."""
        rule = None if self._memory is None else self._memory.take(rank, said)
        if isinstance(said, Saved):
            rule = self._collector.saved(rank, said) or rule
            self._tell_saving(said)
        elif isinstance(said, PartSafe):
            rule = self._collector.part_safe(rank, said) or rule
        elif isinstance(said, Scored):
            self._collector.scored(rank, said)
        self._commit_complete()
        return rule

    def part_failed(self, said: PartFailed) -> str:
        """A part could not be written; returns what to tell."""
        return self.failed(self._collector.part_failed(said.call), said.error)

    def left(self, rank: int) -> str | None:
        """A rank has returned; returns the rule that is broken by what it did not do."""
        rule = None if self._memory is None else self._memory.left(rank)
        rule = self._collector.left(rank) or rule
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
        self._let_go(shown.attempt, doomed)

    def _let_go(self, attempt: int, doomed: Sequence[int]) -> None:
        for number in doomed:
            self._out(Say(frames.CHECKPOINT_DELETED, attempt, data={"number": number}))
            self._out(Note("checkpoint_deleted", {"number": number}))
            self._out(DeleteCheckpoint(number))

    def failed(self, number: int, error: str) -> str:
        self._in_flight.pop(number, None)
        self._out(Say(frames.NOT_SAVED, self._attempt, data={"number": number}))
        message = f"checkpoint {number} could not be written: {error}"
        self._out(Note("warning", {"message": message}))
        return message

    def _tell_saving(self, said: Saved) -> None:
        """Readers hear of each save once, and to which round it belongs: in a loop that saves first, to the next."""
        if said.call == 0 and self._saves_first is None:
            self._saves_first = said.reports == 0
        number = self.number_of(said.call)
        if number > self._last_told and number % self._stored_every == 0:
            self._last_told = number
            iteration = self._started_from.iteration + said.reports + bool(self._saves_first)
            self._out(Say(frames.SAVING, self._attempt, data={"number": number, "iteration": iteration}))

    def _commit_complete(self) -> None:
        complete = self._collector.complete()
        self._take_scores(self._collector.complete_scores())
        for manifest in complete:
            self._commit(self._shelf.scored(manifest))
            if manifest.is_files and self._memory is not None:
                self._memory.discard(manifest.number - self._first_number)

    def _commit(self, manifest: Manifest) -> None:
        self._last_number = max(self._last_number, manifest.number)
        self._in_flight[manifest.number] = manifest
        self._out(Commit(manifest))

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
            **({"from_memory": True} if manifest.number in self._from_memory else {}),
        }
