"""Which checkpoints of an attempt are complete. Pure.

The n-th ``save_checkpoint`` calls of all ranks form one checkpoint. It is complete when every rank that is still running
has made its n-th call and every call's bytes are safe; a rank that has returned is not waited for.

Calls by some ranks only are refused, before anything is made of them:

- calls of which a rank takes no part at all: it has returned without any, or reports on past the first one;
- a call to which the state is missing, as the rank that gives it has returned.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysgd.checkpoint.manifest import FileEntry, Manifest
from raysgd.controller.reducing import Reduce, reduce_metrics
from raysgd.data.position import check_agreement
from raysgd.errors import CheckpointError
from raysgd.session.events import PartSafe, Saved, Scored
from raysgd.session.rank_state import positions_in


@dataclass
class _Pending:
    calls: dict[int, Saved] = field(default_factory=dict)
    parts: dict[int, PartSafe] = field(default_factory=dict)
    is_refused: bool = False


class Score(NamedTuple):
    """A round that a checkpoint belongs to: its metrics (None: the checkpoint has its own), and training time up to it."""

    number: int
    metrics: dict[str, Any] | None
    time_total_s: float


class CheckpointCollector:
    """The saves of one attempt, from first call to complete manifest.

    Args:
        is_resumed: The attempt goes on from a checkpoint: a rank that has made all its saves before may make none here.
    """

    def __init__(
        self,
        attempt: int,
        world_size: int,
        *,
        first_number: int,
        iterations_before: int,
        reduce: Reduce,
        is_resumed: bool = False,
    ) -> None:
        self._attempt = attempt
        self._world_size = world_size
        self._first_number = first_number
        self._iterations_before = iterations_before
        self._reduce = reduce
        self._is_resumed = is_resumed
        self._refused_from: int | None = None  # this call and all after it
        self._given_up: set[int] = set()  # calls that could not be written
        self._pending: dict[int, _Pending] = {}
        self._num_calls = [0] * world_size
        self._num_reports = [0] * world_size
        self._left: set[int] = set()
        self._first_save_after: int | None = None  # reports
        self._scores: dict[int, dict[int, Scored]] = {}
        self._in_step: dict[int, set[int]] = {}  # of each call that is complete: who made it after equally many reports
        self._is_over = False

    def reported(self, rank: int, count: int) -> None:
        """``rank`` has made ``count`` reports so far."""
        self._num_reports[rank] = count

    @property
    def num_rounds(self) -> int:
        """Rounds that all ranks have made that have not returned."""
        return min((count for rank, count in enumerate(self._num_reports) if rank not in self._left), default=0)

    def saved(self, rank: int, event: Saved) -> str | None:
        """``rank`` made a call; returns what is wrong with it, if anything."""
        pending = self._pending.setdefault(event.call, _Pending())
        pending.calls[rank] = event
        self._num_calls[rank] = max(self._num_calls[rank], event.call + 1)
        if event.call == 0 and self._first_save_after is None:
            self._first_save_after = event.reports
        return self._disagreement(event.call, pending) or self._one_sided()

    def part_safe(self, rank: int, event: PartSafe) -> str | None:
        """The bytes of a part are safe; returns what is wrong with its place in the data, if anything."""
        pending = self._pending.setdefault(event.call, _Pending())
        pending.parts[rank] = event
        try:
            check_agreement({rank: positions_in(part.rank_state) for rank, part in pending.parts.items()})
        except CheckpointError as error:
            pending.is_refused = True
            return str(error)
        return None

    def part_failed(self, call: int) -> int:
        """The part can never be safe: the checkpoint is given up. Returns its number."""
        self._pending.pop(call, None)
        self._given_up.add(call)
        return self._first_number + call

    def discard(self, call: int) -> None:
        """Nothing is to be made of this call here."""
        self._pending.pop(call, None)

    def left(self, rank: int) -> str | None:
        """``rank`` has returned; returns what is wrong if that leaves calls without what they need of it."""
        self._left.add(rank)
        return self._one_sided()

    def complete(self) -> list[Manifest]:
        """The checkpoints that have become complete, oldest first; each is given once."""
        # Ranks that had not yet said so still call and write for one that was given up.
        pending = [(call, which) for call, which in sorted(self._pending.items()) if call not in self._given_up]
        if self._refused_from is not None:
            pending = [(call, which) for call, which in pending if call < self._refused_from]
        ready = [call for call, which in pending if self._is_complete(which)]
        return [self._manifest(call, self._pending.pop(call)) for call in ready]

    def scored(self, rank: int, event: Scored) -> None:
        """``rank`` made the report that its call belongs to."""
        self._scores.setdefault(event.call, {})[rank] = event

    def complete_scores(self, *, is_over: bool = False) -> list[Score]:
        """The rounds that complete checkpoints belong to and that are complete themselves; each once.

        It is the round after those that the checkpoint's iteration counts; ranks that saved in another round have no part in
        it.

        Args:
            is_over: The attempt is: from now on the ranks that have not made a round are not waited for.
        """
        self._is_over = self._is_over or is_over
        running = set() if self._is_over else set(range(self._world_size)) - self._left
        found = []
        for call, by_rank in sorted(self._scores.items()):
            if call in self._in_step and running & self._in_step[call] <= set(by_rank):
                del self._scores[call]
                found.append((call, {rank: event for rank, event in by_rank.items() if rank in self._in_step[call]}))
        return [self._score(call, by_rank) for call, by_rank in found if by_rank]

    def _score(self, call: int, by_rank: dict[int, Scored]) -> Score:
        metrics = self._reduced({rank: event.metrics for rank, event in by_rank.items()})
        return Score(self._first_number + call, metrics, by_rank[min(by_rank)].time_total_s)

    def _is_complete(self, pending: _Pending) -> bool:
        if pending.is_refused or not pending.calls:
            return False
        running = set(range(self._world_size)) - self._left
        needed = running | self._givers(pending)
        return needed <= set(pending.calls) <= set(pending.parts)

    def _givers(self, pending: _Pending) -> set[int]:
        """The ranks whose state it is."""
        all_ranks = next(iter(pending.calls.values())).all_ranks
        return set(range(self._world_size)) if all_ranks else {0}

    def _manifest(self, call: int, pending: _Pending) -> Manifest:
        first = pending.calls[min(pending.calls)]
        self._in_step[call] = {rank for rank, saved in pending.calls.items() if saved.reports == first.reports}
        return Manifest(
            number=self._first_number + call,
            attempt=self._attempt,
            iteration=self._iterations_before + first.reports,
            time_total_s=first.time_total_s,
            world_size=self._world_size,
            metrics=self._reduced({rank: saved.metrics for rank, saved in pending.calls.items()}) or {},
            all_ranks=first.all_ranks,
            is_files=first.is_files,
            trusted=first.trusted,
            is_reshardable=_is_reshardable([part.beside for part in pending.parts.values()]),
            created_s=time.time(),
            parts={
                rank: [FileEntry(*entry) for entry in part.files] for rank, part in pending.parts.items() if part.files
            },
            rank_states={rank: part.rank_state for rank, part in pending.parts.items()},
        )

    def _reduced(self, by_rank: dict[int, bytes | None]) -> dict[str, Any] | None:
        metrics = [json.loads(given) for _, given in sorted(by_rank.items()) if given is not None]
        return reduce_metrics(metrics, self._reduce) if metrics else None

    def _disagreement(self, call: int, pending: _Pending) -> str | None:
        for name in ("all_ranks", "is_files"):
            values = {rank: getattr(saved, name) for rank, saved in sorted(pending.calls.items())}
            if len(set(values.values())) > 1:
                pending.is_refused = True
                return f"save_checkpoint call {call + 1} was made with different {name.replace('is_', '')}: {values}."
        return None

    def _one_sided(self) -> str | None:
        """What is wrong with calls that some ranks have made and others never will."""
        return self._without_a_rank() or self._without_a_state()

    def _without_a_rank(self) -> str | None:
        if not any(self._num_calls):
            return None
        for rank in (rank for rank, count in enumerate(self._num_calls) if count == 0):
            if rank in self._left and not self._is_resumed:
                return self._refuse(0, f"rank {rank} has returned without having called it")
            if self._first_save_after is not None and self._num_reports[rank] > self._first_save_after + 1:
                return self._refuse(0, f"rank {rank} went on without calling it")
        return None

    def _without_a_state(self) -> str | None:
        for call, pending in sorted(self._pending.items()):
            if not pending.calls or call in self._given_up:
                continue
            missing = sorted((self._givers(pending) & self._left) - set(pending.calls))
            if missing:
                return self._refuse(call, f"rank {missing[0]} has returned without giving a state to call {call + 1}")
        return None

    def _refuse(self, from_call: int, why: str) -> str:
        """Make no checkpoint of this call nor of later ones; returns the rule that they break."""
        self._refused_from = from_call if self._refused_from is None else min(self._refused_from, from_call)
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(self._num_calls))
        return (
            f"save_checkpoint was called by some ranks only ({counts}). Every rank calls it, equally often; "
            f"rank 0 gives the state and the others may give None. Here {why}."
        )


def _is_reshardable(beside: list[str | None]) -> bool:
    """Whether all parts have pieces of arrays, and nothing else that differs from rank to rank."""
    return None not in beside and len(set(beside)) == 1
