"""The checkpoints of a run, from a rank's call to storage and memory. Pure: part of the run's state machine.

`CheckpointCoordinator` decides which checkpoints are complete, commits them, deletes those that retention does not keep, and
knows from which checkpoint the next attempt starts. `MemoryTier` does the same for checkpoints in the cluster's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.checkpoints.index import CheckpointIndex
from raysgd.controller.checkpoints.pending import PendingCheckpoints
from raysgd.controller.frames import Closing
from raysgd.controller.run_plan import PreviousState, RunPlan, Start
from raysgd.session.events import (
    HoldFailed,
    LiveReport,
    Mark,
    Marked,
    PartFailed,
    PartHeld,
    PartSafe,
    Saved,
    StepId,
    describe_checkpoint,
    is_copy,
)
from raysgd.transport import Endpoint

if TYPE_CHECKING:
    from raysgd.controller.policies.live import LiveStart

Emit = Callable[[c.Command], None]
NO_REPORTS: Mapping[int, LiveReport] = MappingProxyType({})


class MemoryTier:
    """The checkpoints of a run that are in the cluster's memory.

    Args:
        on_in_memory: Called with the number of each checkpoint that is complete in memory.

    Attributes:
        index: The complete checkpoints; their manifests are as they would be on storage, without files.
        pending: The saves of the current attempt.
    """

    def __init__(self, emit: Emit, on_in_memory: Callable[[int], None] = lambda number: None) -> None:
        self._emit = emit
        self._on_in_memory = on_in_memory
        self.index = CheckpointIndex(Start(), RetentionPolicy(1))
        self.pending = PendingCheckpoints()

    def begin_attempt(self, pending: PendingCheckpoints) -> None:
        """Collect the parts of the new attempt in ``pending``."""
        self.pending = pending

    def on_returned(self, rank: int) -> str | None:
        """A rank has returned; returns the rule that it broke, or None."""
        problem = self.pending.on_returned(rank)
        self._keep_complete()
        return problem

    def on_event(self, rank: int, event: Saved | PartSafe | PartHeld | HoldFailed) -> str | None:
        """A rank has sent an event; returns the rule that it broke, or None."""
        problem = None
        if isinstance(event, HoldFailed):
            self.pending.drop(event.call)
        elif isinstance(event, PartHeld):
            part = PartSafe(event.call, (), event.rank_state, event.unsharded_digest)
            problem = self.pending.on_event(rank, part)
        elif not isinstance(event, PartSafe) or (
            rank != 0 and not event.files
        ):  # a part with files is on storage alone
            problem = self.pending.on_event(rank, event)
        self._keep_complete()
        return problem

    def apply_scores(self, *, is_over: bool = False) -> None:
        """Assign checkpoints to their rounds. ``is_over``: no longer wait for the reports of ranks that are gone."""
        for score in self.pending.pop_scores(is_over=is_over):
            self.index.score(score)

    def _keep_complete(self) -> None:
        for manifest in self.pending.pop_complete():
            self.index.add(manifest)
            self._emit(c.KeepInMemory(manifest.number))
            self._on_in_memory(manifest.number)
        self.apply_scores()


class CheckpointCoordinator:
    """All checkpoints of a run, and the saves of its current attempt.

    Args:
        uri_of: Returns the folder of a checkpoint, by its number.
        on_in_memory: Called with the number of each checkpoint in memory, which the next attempt can start from.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        uri_of: Callable[[int], str],
        emit: Emit,
        on_in_memory: Callable[[int], None] = lambda number: None,
    ) -> None:
        config = plan.checkpoint
        retention = RetentionPolicy(config.num_to_keep, config.score_attribute, config.score_order, config.keep_best)
        self._index = CheckpointIndex(plan.start, retention, plan.earlier)
        self._retention = retention
        self._is_score_checked = retention.score_attribute is None
        self._reduce = plan.reduce
        self._workers_per_replica = plan.workers_per_replica
        self._uri_of = uri_of
        self._emit = emit
        self._memory = MemoryTier(emit, on_in_memory) if config.keep_in_memory else None
        self._copies = MemoryTier(emit)  # of live states
        self._stored_every = max(1, config.storage_interval)
        self._in_flight: dict[int, Manifest] = {}
        self._parts_s: dict[int, float] = {}  # of the slowest part of each of them
        self._storing: set[int] = set()  # numbers that are being written from memory
        self._tried: set[int] = set()  # numbers that are being or were written from memory
        self._from_memory: set[int] = set()  # numbers that were written from memory
        self._lost: set[int] = set()  # numbers that were in memory alone
        self._last_number = plan.start.number
        self._last_announced = plan.start.number  # to readers, as being saved
        self._first_number = 1
        self._attempt = self._world_size = 0
        self._marks: dict[int, tuple[Mark, ...]] = {}  # of ranks whose processes died in the attempt
        self._unusable_sources: set[Endpoint | None] = set()
        self._started_from = plan.start
        self._pending = PendingCheckpoints()

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no manifest is being written."""
        return not self._in_flight

    @property
    def newest_number(self) -> int | None:
        newest = self._index.newest
        return None if newest is None else newest.number

    @property
    def stored(self) -> list[Manifest]:
        """The checkpoints on storage, oldest first."""
        return self._index.manifests

    @property
    def newest_uri(self) -> str | None:
        return None if self.newest_number is None else self._uri_of(self.newest_number)

    @property
    def newest_in_memory(self) -> Manifest | None:
        """The newest checkpoint in memory, if the next attempt would start from it."""
        held = None if self._memory is None else self._memory.index.newest
        return held if held is not None and held.number >= (self.newest_number or 0) else None

    @property
    def in_memory(self) -> Manifest | None:
        """The newest checkpoint or copy of a live state in memory, if the next attempt would start from it."""
        held, copied = self.newest_in_memory, self._copies.index.newest
        stored = self._index.start(self._uri_of).time_total_s
        is_later = copied is not None and copied.time_total_s > max(stored, 0.0 if held is None else held.time_total_s)
        return copied if is_later else held

    @property
    def numbers_in_memory(self) -> set[int]:
        """The numbers of the checkpoints and copies in memory that an attempt may start from."""
        newest = self.newest_in_memory, self._copies.index.newest
        return {manifest.number for manifest in newest if manifest is not None}

    @property
    def has_unstored(self) -> bool:
        """Whether the next attempt would start from a checkpoint that is in memory alone."""
        held = self.newest_in_memory
        return held is not None and held.number > (self.newest_number or 0)

    @property
    def has_any(self) -> bool:
        """Whether the run has a checkpoint, on storage or in memory."""
        return self.newest_number is not None or self.newest_in_memory is not None

    @property
    def is_bound_to_size(self) -> bool:
        """Whether the newest checkpoint can be loaded only by as many ranks as saved it."""
        newest = self.newest_in_memory or self._index.newest
        return newest is not None and newest.all_ranks and not newest.is_reshardable

    @property
    def last_checkpoint(self) -> str:
        """A sentence about the newest checkpoint, for the end of an error message."""
        uri = self.newest_uri
        return "The run has no checkpoint." if uri is None else f"Its last checkpoint, to resume from, is {uri}."

    def newest_iteration(self) -> int:
        """Return the iteration of the newest checkpoint or copy, also of one that is being committed; 0 without one."""
        known = [*self._in_flight.values(), *self._index.manifests, self.newest_in_memory, self.in_memory]
        return max((manifest.iteration for manifest in known if manifest is not None), default=0)

    def number_of(self, call: int) -> int:
        """Return the number of the checkpoint that the ``call``-th saves of the attempt make."""
        return self._first_number + call

    # -- attempts -----------------------------------------------------------------------------------------------------

    def restore(self, previous: PreviousState) -> None:
        """Take over the checkpoints of an earlier controller process; readers learn of those they may not know."""
        self._last_number = max(self._last_number, previous.last_number)
        self._is_score_checked = self._is_score_checked or bool(previous.known)
        for manifest in previous.manifests:
            if manifest.attempt < previous.attempt:
                self._from_memory.add(manifest.number)
            known_iteration = previous.known.get(manifest.number)
            if known_iteration is None:
                self.on_committed(manifest)
                continue
            if manifest.iteration != known_iteration:
                self._emit(c.EmitFrame(frames.CHECKPOINT_SCORED, manifest.attempt, data=self._describe(manifest)))
            self._delete(manifest.attempt, self._index.add(manifest))

    def find_live(self, reports: Mapping[int, LiveReport], world_size: int) -> LiveStart | str | None:
        """Return the complete step that survivors hold, if the next attempt starts from it.

        Args:
            reports: What the processes of the next attempt have, by rank.
            world_size: The number of ranks of the next attempt.

        Returns:
            The step; or why there is none, if the last attempt had complete steps; or None.
        """
        if not reports and not self._marks:
            return None
        from raysgd.controller.policies.live import choose_step  # most runs need no live state

        usable = {
            rank: replace(report, held=None) if report.endpoint in self._unusable_sources else report
            for rank, report in reports.items()
        }
        before, size = self._started_from.live, self._world_size
        found = choose_step(self._attempt, usable, self._marks, before, old_size=size, new_size=world_size)
        if isinstance(found, str):
            return found
        newest = max(self.newest_number or 0, 0 if self.newest_in_memory is None else self.newest_in_memory.number)
        # The checkpoint of a save that followed the step at once has the same state.
        is_of_attempt = found.held.id.attempt == self._attempt
        last_before = self._first_number + found.held.num_saves if is_of_attempt else self._first_number - 1
        return found if newest <= last_before else None

    def begin_attempt(
        self, attempt: int, world_size: int, live: Mapping[int, LiveReport] = NO_REPORTS
    ) -> tuple[Start, int]:
        """Begin to collect the saves of an attempt; returns where it starts, and the number that its first save makes.

        Args:
            attempt: Its number.
            world_size: The number of its ranks.
            live: What its processes have of the live state, by rank.
        """
        known = [*self._marks.values(), *(each.marks for each in live.values() if each.attempt == self._attempt)]
        furthest = max((mark.step + mark.is_in_step for marks in known for mark in marks), default=0)
        start = self._find_start(world_size, furthest)
        found = self.find_live(live, world_size)
        copied = self._copies.index.newest
        has_newer = copied is not None and self.in_memory is not copied  # a checkpoint in memory
        if isinstance(found, str) and start.copied is None and not has_newer:
            where = f"checkpoint {start.number}" if start.is_checkpoint else "the beginning"
            self._emit(c.warning(f"training continues from {where}, not from a live state: {found}"))
        elif found is not None and not isinstance(found, str):
            iteration = max(start.iteration, found.held.iteration)
            start = Start(None, iteration, found.held.time_total_s, self._last_number, live=found)
        self._marks.clear()
        # A checkpoint in memory may be written to storage later: its number is taken.
        self._last_number = max(self._last_number, start.number)
        self._first_number = self._last_number + 1
        self._last_announced = self._last_number  # a number that no checkpoint was made of is used again

        def make_pending() -> PendingCheckpoints:
            return PendingCheckpoints(
                attempt, world_size, self._first_number, start, self._reduce, self._workers_per_replica
            )

        self._attempt, self._world_size, self._started_from = attempt, world_size, start
        self._pending = make_pending()
        if self._memory is not None:
            self._memory.begin_attempt(make_pending())
        self._copies.begin_attempt(PendingCheckpoints(attempt, world_size, 0, start))
        if start.held is not None and start.copied is None and start.number % self._stored_every == 0:
            self.store_held()  # it was being written to storage when the last attempt ended
        return start, self._first_number

    def skip_start(self, rank: int, error: str) -> str | None:
        """Make the next attempt start from another survivor, or the checkpoint before, as ``rank`` could not load its start.

        Returns:
            Why the attempt must be ended; None if there is no earlier checkpoint, so that the error is raised.
        """
        number, live = self._started_from.number, self._started_from.live
        if live is not None:
            source, endpoint = live.source_of(rank)
            self._unusable_sources.add(endpoint)  # it may be dying; others may hold the step too
            why = f"the memory of rank {source} is not used: {error}"
            self._emit(c.warning(why))
            return why
        held = self._started_from.held
        if held is not None and is_copy(held.number):
            self._copies.index.drop(number := held.number)
        elif held is not None and self._memory is not None:
            self._memory.index.drop(number)
        elif self._index.has_older_than(number):
            self._index.drop(number)
        else:
            return None
        why = f"{describe_checkpoint(number)} skipped: {error}"
        self._emit(c.warning(why))
        return why

    def end_attempt(self, iterations_before: int) -> int:
        """End the attempt; returns how many of its rounds are part of its checkpoints.

        Reports of ranks that are gone are not waited for: a round consists of what the other ranks reported. Where ranks
        report at different saves, an older checkpoint may have got its score from a later round than the newest.
        """
        self._apply_scores(is_over=True)
        return max(0, self.newest_iteration() - iterations_before)

    def _find_start(self, world_size: int, furthest: int) -> Start:
        """Return where an attempt starts without a live state; ``furthest``: the last step that some rank had begun."""
        start, held = self._index.start(self._uri_of), self.newest_in_memory
        newest = self.in_memory
        if newest is not None and is_copy(newest.number) and (world_size == newest.world_size or newest.is_reshardable):
            from raysgd.controller.policies.live import CopiedStart  # most runs need no live state

            step = StepId.of_copy(newest.number)
            number = start.number if held is None else held.number
            copied = CopiedStart(step, max(1, furthest - (step.step if step.attempt == self._attempt else 0)))
            return Start(None, newest.iteration, newest.time_total_s, number, newest, copied=copied)
        if held is None:
            return start
        uri = start.uri if start.number == held.number else None
        return Start(uri, held.iteration, held.time_total_s, held.number, held)

    # -- events of ranks ----------------------------------------------------------------------------------------------

    def on_reports(self, rank: int, count: int, closings: tuple[Closing, ...]) -> None:
        """A rank has made ``count`` reports in the attempt so far, some of which checkpoints belong to."""
        self._pending.on_reports(rank, count, closings)
        if self._memory is not None:
            self._memory.pending.on_reports(rank, count, closings)
        if closings:
            self._apply_scores()

    def on_event(self, rank: int, event: Saved | PartSafe | PartHeld | HoldFailed | Marked) -> str | None:
        """A rank has sent an event; returns the rule that it broke, or None."""
        if isinstance(event, Marked):
            self._marks[rank] = event.marks
            return None
        if is_copy(event.call):
            return self._copies.on_event(rank, event)
        problem = None if self._memory is None else self._memory.on_event(rank, event)
        if not isinstance(event, (PartHeld, HoldFailed)):
            problem = self._pending.on_event(rank, event) or problem
        if isinstance(event, Saved):
            self._announce(event)
        self._commit_complete()
        return problem

    def on_part_failed(self, event: PartFailed) -> str:
        """A part could not be written; returns the message for the user."""
        return self.on_commit_failed(self._pending.drop(event.call), event.error)

    def on_returned(self, rank: int) -> str | None:
        """A rank has returned; returns the rule that it broke, or None."""
        problem = None if self._memory is None else self._memory.on_returned(rank)
        problem = self._pending.on_returned(rank) or problem
        self._commit_complete()
        return problem

    def _announce(self, event: Saved) -> None:
        """Announce each save to readers once, with the round it belongs to: the next round in a loop that saves first."""
        number = self.number_of(event.call)
        if number > self._last_announced and number % self._stored_every == 0:
            self._last_announced = number
            iteration = self._started_from.iteration + event.reports + event.awaits_round
            self._emit(c.EmitFrame(frames.SAVING, self._attempt, data={"number": number, "iteration": iteration}))

    def _commit_complete(self) -> None:
        for manifest in self._pending.pop_complete():
            self._parts_s[manifest.number] = self._pending.parts_s.pop(manifest.number)
            self._commit(manifest)
            if manifest.is_files and self._memory is not None:  # files are on storage alone
                self._memory.pending.drop(manifest.number - self._first_number)
        self._apply_scores()

    # -- storage and memory -------------------------------------------------------------------------------------------

    def store_held(self) -> bool:
        """Write the newest checkpoint from memory to storage, once, if it is not there.

        Returns:
            Whether a checkpoint is being written from memory.
        """
        if self._memory is not None:
            self._memory.apply_scores(is_over=True)  # no rank is left that could report
        held = self.newest_in_memory
        if held is not None and held.number > max([self.newest_number or 0, *self._in_flight, *self._tried]):
            self._tried.add(held.number)
            self._storing.add(held.number)
            self._emit(c.StoreFromMemory(held))
        return bool(self._storing)

    def on_memory_copy(self, given: c.MemoryCopyLost | c.MemoryCopyStored | c.MemoryCopyNotStored) -> None:
        """A checkpoint in memory was lost or written to storage."""
        if isinstance(given, c.MemoryCopyStored):
            self._storing.discard(given.manifest.number)
            if given.manifest.number not in self._lost:  # otherwise the attempt has begun without it
                self._from_memory.add(given.manifest.number)
                self._commit(given.manifest)
        elif isinstance(given, c.MemoryCopyNotStored):
            self._storing.discard(given.number)
            self._report_not_saved(
                given.number,
                f"checkpoint {given.number} is in memory alone and could not be written to storage: {given.error}",
            )
        elif is_copy(given.number):
            self._copies.index.drop(given.number)
            self._emit(c.warning(f"{describe_checkpoint(given.number)} is no longer in the cluster's memory"))
        elif self._memory is not None:
            self._memory.index.drop(given.number)
            self._lost.add(given.number)
            self._last_number = max(self._last_number, given.number)  # parts of it may be on storage, or come there
            self._emit(c.warning(f"checkpoint {given.number} is no longer in the cluster's memory"))

    def on_committed(self, manifest: Manifest, commit_s: float = 0.0) -> None:
        """A manifest is on storage, and was written in ``commit_s`` seconds."""
        shown = self._in_flight.pop(manifest.number, manifest)
        if self._index.newest is not None:
            self._check_score(self._index.newest)  # it will get no metrics any more
        to_delete = self._index.add(shown)
        data = self._describe(shown)
        self._emit(c.EmitFrame(frames.CHECKPOINT, shown.attempt, data=data))
        size_bytes = sum(entry.size for part in shown.parts.values() for entry in part)
        # Ranks that call later than others do not make the writing longer. None: written from memory after a failure.
        parts_s = self._parts_s.pop(manifest.number, None)
        seconds = None if parts_s is None else round(parts_s + commit_s, 3)
        self._emit(c.RecordEvent("checkpoint", {**data, "size_bytes": size_bytes, "seconds": seconds}))
        if shown is not manifest:  # its round was completed while it was being written
            self._emit(c.WriteRound(shown))
        if shown.metrics:  # otherwise its round may still be reported
            self._check_score(shown)
        self._delete(shown.attempt, to_delete)

    def on_run_over(self) -> None:
        """The run is over, so no checkpoint gets metrics any more."""
        if self._index.newest is not None:
            self._check_score(self._index.newest)

    def on_commit_failed(self, number: int, error: str) -> str:
        """A checkpoint could not be written; returns the message for the user."""
        self._in_flight.pop(number, None)
        self._parts_s.pop(number, None)
        message = f"checkpoint {number} could not be written: {error}"
        self._report_not_saved(number, message)
        return message

    def _report_not_saved(self, number: int, message: str) -> None:
        self._emit(c.EmitFrame(frames.NOT_SAVED, self._attempt, data={"number": number}))
        self._emit(c.warning(message))

    def _commit(self, manifest: Manifest) -> None:
        self._last_number = max(self._last_number, manifest.number)
        self._in_flight[manifest.number] = manifest
        self._emit(c.CommitCheckpoint(manifest))

    def _delete(self, attempt: int, numbers: Sequence[int]) -> None:
        for number in filter(lambda number: number > 0, numbers):
            self._emit(c.EmitFrame(frames.CHECKPOINT_DELETED, attempt, data={"number": number}))
            self._emit(c.RecordEvent("checkpoint_deleted", {"number": number}))
            self._emit(c.DeleteCheckpoint(number))
        if earlier := tuple(number for number in numbers if number <= 0):
            self._emit(c.DeleteEarlier(earlier))

    def _apply_scores(self, *, is_over: bool = False) -> None:
        """Assign checkpoints to the rounds that have become complete. ``is_over``: as for `MemoryTier.apply_scores`."""
        if self._memory is not None:
            self._memory.apply_scores(is_over=is_over)
        for score in self._pending.pop_scores(is_over=is_over):
            if (written := self._in_flight.get(score.number)) is not None:
                self._in_flight[score.number] = written.with_round(score.metrics, score.time_total_s)
            elif (scored := self._index.score(score)) is not None:
                self._emit(c.WriteRound(scored))
                self._emit(c.EmitFrame(frames.CHECKPOINT_SCORED, scored.attempt, data=self._describe(scored)))
                self._check_score(scored)

    def _check_score(self, manifest: Manifest) -> None:
        """Warn if the first checkpoint whose metrics are known cannot be ranked by ``score_attribute``."""
        is_checked, self._is_score_checked = self._is_score_checked, True
        if is_checked or self._retention.can_rank(manifest.metrics):
            return
        why = self._retention.explain_unranked(manifest.metrics)
        message = f"CheckpointConfig(score_attribute={self._retention.score_attribute!r}): checkpoint {manifest.number} {why}."
        if self._retention.num_to_keep is not None:
            message += " No checkpoint is deleted until one has the metric, so num_to_keep does not bound their number."
        self._emit(c.warning(message))

    def _describe(self, manifest: Manifest) -> dict[str, Any]:
        return {
            "number": manifest.number,
            "uri": self._uri_of(manifest.number),
            "iteration": manifest.iteration,
            "metrics": manifest.metrics,
            **({"from_memory": True} if manifest.number in self._from_memory else {}),
        }
