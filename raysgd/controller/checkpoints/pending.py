"""The saves of an attempt, from the first rank's call to a complete checkpoint. Pure.

The n-th ``save_checkpoint`` calls of all ranks form one checkpoint. The checkpoint is complete when every rank that is still
running has made its n-th call and the parts of all calls are durable. A rank that has returned is not waited for.

Calls by some ranks only are refused, before a checkpoint is made of them:

- a rank has never called ``save_checkpoint``: it has returned, or has reported again after the others' first call;
- a call has no state, because the rank that gives the state has returned.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.controller import frames
from raysgd.controller.frames import Closing, Frame
from raysgd.controller.rounds import Reduce, reduce_by_rank
from raysgd.controller.run_plan import Start
from raysgd.data.order.position import check_agreement
from raysgd.errors import CheckpointError
from raysgd.session.events import PartSafe, Saved
from raysgd.session.rank_state import positions_in


@dataclass
class _Pending:
    """One save. With a thousand ranks, an event must not look at all of them.

    Attributes:
        calls: By rank.
        parts: By rank.
        absent: Ranks that have returned without this call.
        unsafe: Ranks that have made the call, and whose part is not durable.
    """

    absent: set[int]
    calls: dict[int, Saved] = field(default_factory=dict)
    parts: dict[int, PartSafe] = field(default_factory=dict)
    unsafe: set[int] = field(default_factory=set)
    is_refused: bool = False

    @property
    def first_call(self) -> Saved:
        return next(iter(self.calls.values()))

    @property
    def first_part(self) -> PartSafe:
        return next(iter(self.parts.values()))

    def without_state(self) -> set[int]:
        """Return the ranks that have returned without giving a state that the checkpoint needs."""
        return self.absent if self.first_call.all_ranks else self.absent & {0}


class Score(NamedTuple):
    """The round that checkpoint ``number`` belongs to."""

    number: int
    metrics: dict[str, Any]
    time_total_s: float


class PendingCheckpoints:
    """The saves of one attempt.

    Args:
        first_number: Number of the checkpoint that the first save makes.
        start: Where the attempt starts.
        reduce: How metrics of a checkpoint are made from those of all ranks.
        workers_per_replica: Ranks that hold one replica of the model between them; `reduce` counts replicas.

    Attributes:
        parts_s: Seconds that the slowest part of a complete checkpoint took, by its number.
    """

    def __init__(
        self,
        attempt: int = 0,
        world_size: int = 0,
        first_number: int = 1,
        start: Start | None = None,
        reduce: Reduce | None = None,
        workers_per_replica: int = 1,
    ) -> None:
        self.parts_s: dict[int, float] = {}
        self._attempt = attempt
        self._world_size = world_size
        self._first_number = first_number
        self._start = start or Start()
        self._reduce = reduce or {}
        self._workers_per_replica = workers_per_replica
        self._refused_from = math.inf  # this call and all later ones
        self._dropped: set[int] = set()  # calls
        self._pending: dict[int, _Pending] = {}
        self._num_calls = [0] * world_size
        self._num_reports = [0] * world_size
        self._all_ranks = frozenset(range(world_size))
        self._uncalled = set(self._all_ranks)  # ranks without any call
        self._late: set[int] = set()  # those of them that have reported again after the first call of another rank
        self._returned: set[int] = set()
        self._first_save_after: int | None = None  # reports
        self._closings: dict[int, dict[int, Closing]] = {}  # by call and rank
        self._scored: set[int] = set()  # calls whose round is known
        self._in_step: dict[
            int, frozenset[int]
        ] = {}  # by complete call, the ranks that made it after equally many reports
        self._is_over = False

    def on_reports(self, rank: int, count: int, closings: Iterable[Closing] = ()) -> None:
        """``rank`` has made ``count`` reports so far, some of which checkpoints belong to."""
        self._num_reports[rank] = count
        if self._first_save_after is not None and rank in self._uncalled:
            self._note_late(rank)
        for closing in closings:
            if (call := closing.number - self._first_number) not in self._scored:
                self._closings.setdefault(call, {})[rank] = closing

    def on_event(self, rank: int, event: Saved | PartSafe) -> str | None:
        """Take an event of a rank; returns the rule that the ranks broke, or None."""
        pending = self._pending.get(event.call)
        if pending is None:
            pending = self._pending[event.call] = _Pending(set(self._returned))
        if isinstance(event, PartSafe):
            pending.parts[rank] = event
            pending.unsafe.discard(rank)
            return self._find_different_positions(pending, event)
        pending.calls[rank] = event
        pending.absent.discard(rank)
        if rank not in pending.parts:
            pending.unsafe.add(rank)
        self._num_calls[rank] = max(self._num_calls[rank], event.call + 1)
        self._uncalled.discard(rank)
        self._late.discard(rank)
        if event.call == 0 and self._first_save_after is None:
            self._first_save_after = event.reports
            for other in self._uncalled:
                self._note_late(other)
        return self._find_different_arguments(event, pending) or self._find_one_sided_call()

    def drop(self, call: int) -> int:
        """Make no checkpoint of this call; returns the number that the checkpoint would have had."""
        self._pending.pop(call, None)
        self._dropped.add(call)
        return self._first_number + call

    def on_returned(self, rank: int) -> str | None:
        """``rank`` has returned; returns the rule that is broken if calls still need this rank, or None."""
        self._returned.add(rank)
        for pending in self._pending.values():
            if rank not in pending.calls:
                pending.absent.add(rank)
        return self._find_one_sided_call()

    def pop_complete(self) -> list[Manifest]:
        """Return the checkpoints that have become complete, oldest first, each once; with their rounds if these are complete."""
        ready = [call for call, pending in sorted(self._pending.items()) if self._is_complete(call, pending)]
        return [self._manifest(call, self._pending.pop(call)) for call in ready]

    def pop_scores(self, *, is_over: bool = False) -> list[Score]:
        """Return the rounds that have become complete since their checkpoints were returned; each is returned once.

        Args:
            is_over: The attempt is over. From now on, missing reports are not waited for.
        """
        self._is_over = self._is_over or is_over
        found = [self._pop_score(call) for call in sorted(self._closings)]
        return [score for score in found if score is not None]

    def _pop_score(self, call: int) -> Score | None:
        """Return the round that a complete checkpoint belongs to, once it is complete.

        That is the round after those that the checkpoint's iteration counts. Ranks that saved in another round do not
        contribute to it.
        """
        in_step, by_rank = self._in_step.get(call), self._closings.get(call)
        if in_step is None or by_rank is None:
            return None
        # The first comparison says no to nearly every event, without looking at all ranks.
        is_waited_for = len(in_step) > len(by_rank) + len(self._returned) or in_step - self._returned - by_rank.keys()
        if is_waited_for and not self._is_over:
            return None
        del self._closings[call]
        made = {rank: closing for rank, closing in by_rank.items() if rank in in_step}
        if not made:
            return None
        self._scored.add(call)
        return score_of(self._first_number + call, made, self._reduce, self._workers_per_replica)

    def _is_complete(self, call: int, pending: _Pending) -> bool:
        # Other ranks may still send events of a call that was dropped.
        if call in self._dropped or call >= self._refused_from or pending.is_refused or not pending.calls:
            return False
        is_called = len(pending.calls) + len(pending.absent) == self._world_size and not pending.without_state()
        has_state = pending.first_call.all_ranks or 0 in pending.calls
        return is_called and has_state and not pending.unsafe

    def _manifest(self, call: int, pending: _Pending) -> Manifest:
        first = pending.calls[min(pending.calls)]
        place = first.reports, first.awaits_round
        in_step = frozenset(rank for rank, each in pending.calls.items() if (each.reports, each.awaits_round) == place)
        self.parts_s[self._first_number + call] = max(part.seconds for part in pending.parts.values())
        self._in_step[call] = self._all_ranks if in_step == self._all_ranks else in_step  # one object, as a rule
        given = {rank: pending.calls[rank].metrics for rank in sorted(in_step)}
        metrics = {rank: json.loads(each) for rank, each in given.items() if each is not None}
        manifest = Manifest(
            number=self._first_number + call,
            attempt=self._attempt,
            iteration=self._start.iteration + first.reports,
            time_total_s=first.time_total_s,
            world_size=self._world_size,
            metrics=reduce_by_rank(metrics, self._reduce, self._workers_per_replica) if metrics else {},
            all_ranks=first.all_ranks,
            is_files=first.is_files,
            allow_pickle=first.allow_pickle,
            is_reshardable=_is_reshardable([part.unsharded_digest for part in pending.parts.values()]),
            awaits_round=first.awaits_round,
            created_s=time.time(),
            parts={rank: list(part.files) for rank, part in pending.parts.items() if part.files},
            rank_states={rank: part.rank_state for rank, part in pending.parts.items()},
        )
        score = self._pop_score(call)
        return manifest if score is None else manifest.with_round(score.metrics, score.time_total_s)

    def _find_different_arguments(self, event: Saved, pending: _Pending) -> str | None:
        for name in ("all_ranks", "is_files"):
            if getattr(event, name) != getattr(pending.first_call, name):
                values = {rank: getattr(saved, name) for rank, saved in sorted(pending.calls.items())}
                pending.is_refused = True
                return f"save_checkpoint call {event.call + 1} was made with different {name.replace('is_', '')}: {values}."
        return None

    def _find_different_positions(self, pending: _Pending, part: PartSafe) -> str | None:
        """Return an error if the ranks' positions in their datasets do not agree, or None."""
        is_first = len(pending.parts) == 1
        if not is_first and positions_in(part.rank_state) == positions_in(pending.first_part.rank_state):
            return None
        try:
            check_agreement({rank: positions_in(part.rank_state) for rank, part in pending.parts.items()})
        except CheckpointError as error:
            pending.is_refused = True
            return str(error)
        return None

    def _note_late(self, rank: int) -> None:
        """Note if a rank without a call should have made one: it has reported again after the first call of another rank."""
        assert self._first_save_after is not None
        if self._num_reports[rank] > self._first_save_after + 1:
            self._late.add(rank)

    def _find_one_sided_call(self) -> str | None:
        """Return the rule that is broken if some ranks made calls that others will never make, or None."""
        return self._find_missing_rank() or self._find_missing_state()

    def _find_missing_rank(self) -> str | None:
        if len(self._uncalled) == self._world_size:
            return None
        # A rank that made all its saves before the checkpoint that the attempt starts from may make none now.
        returned = set() if self._start.is_checkpoint else self._uncalled & self._returned
        if not returned and not self._late:
            return None
        rank = min(returned | self._late)
        if rank in returned:
            return self._refuse(0, f"rank {rank} has returned without having called it")
        return self._refuse(0, f"rank {rank} continued without calling it")

    def _find_missing_state(self) -> str | None:
        for call, pending in sorted(self._pending.items()):
            if pending.calls and call not in self._dropped and (missing := pending.without_state()):
                return self._refuse(call, f"rank {min(missing)} has returned without giving a state to call {call + 1}")
        return None

    def _refuse(self, from_call: int, why: str) -> str:
        """Make no checkpoint of this call and later ones; returns the rule that is broken."""
        self._refused_from = min(self._refused_from, from_call)
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(self._num_calls))
        return (
            f"save_checkpoint was called by some ranks only ({counts}). Every rank calls it, equally often; "
            f"rank 0 gives the state and the others may give None. Here {why}."
        )


def score_of(number: int, by_rank: Mapping[int, Closing], reduce: Reduce, workers_per_replica: int) -> Score:
    """Return the round that a checkpoint belongs to, of the reports of its ranks."""
    metrics = {rank: made.metrics for rank, made in by_rank.items()}
    return Score(number, reduce_by_rank(metrics, reduce, workers_per_replica), by_rank[min(by_rank)].time_total_s)


def find_rounds(manifests: Sequence[Manifest], journal: Iterable[Frame], reduce: Reduce) -> list[Manifest]:
    """Return the checkpoints with the rounds that their own files lack, as the journal has them.

    A process may die after it has written a report, and before it has written that a checkpoint belongs to that round. The
    journal is the record of reports. A rank that saved in another round does not contribute to it.

    Args:
        manifests: The checkpoints of a run.
        journal: The frames of the run, in order; reports before the first save of a checkpoint without a round are not needed.
        reduce: As for `PendingCheckpoints`.
    """
    awaiting = {manifest.number: manifest for manifest in manifests if manifest.awaits_round}
    found: dict[int, dict[int, Closing]] = {}
    begun: dict[int, dict[str, Any]] = {}
    ended: set[int] = set()  # what comes after an attempt's end makes no round
    for frame in journal if awaiting else ():
        if frame.kind == frames.ATTEMPT:
            begun[frame.attempt] = frame.data
        elif frame.kind == frames.ATTEMPT_END:
            ended.add(frame.attempt)
        elif frame.kind == frames.REPORTS and frame.attempt not in ended:
            for closing in frames.closings_of(frame.data, frame.rows):
                saved, before = awaiting.get(closing.number), begun[frame.attempt]["iterations_before"] + closing.report
                if saved is not None and (saved.attempt, saved.iteration) == (frame.attempt, before):
                    found.setdefault(closing.number, {})[frame.rank] = closing
    known = list(manifests)
    for place, manifest in enumerate(known):
        if manifest.number in found:
            per_replica = begun[manifest.attempt].get("workers_per_replica", 1)
            score = score_of(manifest.number, found[manifest.number], reduce, per_replica)
            known[place] = manifest.with_round(score.metrics, score.time_total_s)
    return known


def _is_reshardable(digests: list[str | None]) -> bool:
    """Return whether all parts have array shards, and the rest of all parts is the same."""
    return None not in digests and len(set(digests)) == 1
