"""Which checkpoints of an attempt are complete. Pure.

The n-th ``save_checkpoint`` calls of all ranks form one checkpoint. It is complete when every rank that is still running
has made its n-th call and every call's bytes are safe; a rank that has returned is not waited for.
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
    """The saves of one attempt, from first call to complete manifest."""

    def __init__(
        self, attempt: int, world_size: int, *, first_number: int, iterations_before: int, reduce: Reduce
    ) -> None:
        self._attempt = attempt
        self._world_size = world_size
        self._first_number = first_number
        self._iterations_before = iterations_before
        self._reduce = reduce
        self._pending: dict[int, _Pending] = {}
        self._num_calls = [0] * world_size
        self._num_reports = [0] * world_size
        self._left: set[int] = set()
        self._first_save_after: int | None = None  # reports
        self._scores: dict[int, dict[int, Scored]] = {}

    def reported(self, rank: int, count: int) -> None:
        """``rank`` has made ``count`` reports so far."""
        self._num_reports[rank] = count

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
        return self._first_number + call

    def left(self, rank: int) -> str | None:
        """``rank`` has returned; returns what is wrong if that leaves saves without their partner calls."""
        self._left.add(rank)
        if len(self._left) < self._world_size or len(set(self._num_calls)) == 1:
            return None
        return self._rule()

    def complete(self) -> list[Manifest]:
        """The checkpoints that have become complete, oldest first; each is given once."""
        ready = [call for call, pending in sorted(self._pending.items()) if self._is_complete(pending)]
        return [self._manifest(call, self._pending.pop(call)) for call in ready]

    def scored(self, rank: int, event: Scored) -> None:
        """``rank`` made the report that its call belongs to."""
        self._scores.setdefault(event.call, {})[rank] = event

    def complete_scores(self, *, is_over: bool = False) -> list[Score]:
        """The rounds that checkpoints belong to and that are complete; each once.

        Args:
            is_over: The attempt is: the ranks that have not made a round are waited for no longer.
        """
        running = set() if is_over else set(range(self._world_size)) - self._left
        ready = [call for call, by_rank in sorted(self._scores.items()) if running <= set(by_rank)]
        return [self._score(call, self._scores.pop(call)) for call in ready]

    def _score(self, call: int, by_rank: dict[int, Scored]) -> Score:
        metrics = self._reduced({rank: event.metrics for rank, event in by_rank.items()})
        return Score(self._first_number + call, metrics, by_rank[min(by_rank)].time_total_s)

    def _is_complete(self, pending: _Pending) -> bool:
        if pending.is_refused or not pending.calls:
            return False
        running = set(range(self._world_size)) - self._left
        all_ranks = next(iter(pending.calls.values())).all_ranks
        givers = set(range(self._world_size)) if all_ranks else {0}
        return (
            running <= set(pending.calls) and set(pending.calls) <= set(pending.parts) and givers <= set(pending.calls)
        )

    def _manifest(self, call: int, pending: _Pending) -> Manifest:
        first = pending.calls[min(pending.calls)]
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
                return f"save_checkpoint call {call + 1} was made with different {name.replace('is_', '')}: {values}."
        return None

    def _one_sided(self) -> str | None:
        """A rank that has reported past the place of the first save without saving will never make that call."""
        if self._first_save_after is None:
            return None
        passed = [
            rank
            for rank in range(self._world_size)
            if self._num_calls[rank] == 0 and self._num_reports[rank] > self._first_save_after + 1
        ]
        return self._rule() if passed else None

    def _rule(self) -> str:
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(self._num_calls))
        return (
            f"save_checkpoint was called by some ranks only ({counts}). Every rank calls it, equally often; "
            "rank 0 gives the state and the others may give None."
        )
