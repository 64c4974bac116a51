"""What the controller tells the readers of a run (the driver, the callback host): one numbered sequence of frames.

A frame is made once and passed to every reader; the reports in it stay as the worker encoded them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ATTEMPT = "attempt"  # data: attempt, world_size, iterations_before, time_before_s
REPORTS = "reports"  # rank, rows; data: first, count
RANK_DONE = "rank_done"  # rank
ATTEMPT_END = "attempt_end"  # data: keep_rounds
EVENT = "event"  # data: kind, timestamp, data
SAVING = "saving"  # data: number, iteration (of the round it belongs to); it is to be on storage
NOT_SAVED = "not_saved"  # data: number; that could not be written
CHECKPOINT = "checkpoint"  # data: number, uri, iteration, metrics
CHECKPOINT_SCORED = "checkpoint_scored"  # data: the same
CHECKPOINT_DELETED = "checkpoint_deleted"  # data: number
RUN_END = "run_end"  # data: kind (done, stopped, cancelled, error), message; see `outcome_data`
RUN_CLOSED = "run_closed"  # data: nothing; the last frame of a run


@dataclass(frozen=True)
class Frame:
    """One thing that happened, numbered from 0 within its run."""

    seq: int
    kind: str
    attempt: int
    rank: int = -1
    data: dict[str, Any] = field(default_factory=dict)
    rows: bytes = b""

    @property
    def size_bytes(self) -> int:
        """About what holding it costs."""
        return 200 + len(self.rows)
