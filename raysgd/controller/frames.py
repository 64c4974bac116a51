"""The frames of a run: the numbered sequence that the controller sends to readers (the driver, the callback host).

A frame is made once and sent to every reader. The reports in it stay as the worker encoded them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ATTEMPT = "attempt"  # data: attempt, world_size, iterations_before, time_before_s
REPORTS = "reports"  # rank, rows; data: first, count
RANK_DONE = "rank_done"  # rank
ATTEMPT_END = "attempt_end"  # data: keep_rounds
EVENT = "event"  # data: kind, timestamp, data
SAVING = "saving"  # data: number, iteration (of the round it belongs to); a checkpoint is being written to storage
NOT_SAVED = "not_saved"  # data: number; the checkpoint could not be written
CHECKPOINT = "checkpoint"  # data: number, uri, iteration, metrics
CHECKPOINT_SCORED = "checkpoint_scored"  # data: the same
CHECKPOINT_DELETED = "checkpoint_deleted"  # data: number
RUN_END = "run_end"  # data: kind (done, stopped, cancelled, error), message; see `outcome_data`
RUN_CLOSED = "run_closed"  # data: nothing; the last frame of a run

#: Memory of a frame of reports without its rows, and about that of any other frame.
_REPORT_BYTES = 200
_OTHER_BYTES = 2000


@dataclass(frozen=True)
class Frame:
    """One step of a run: reports, an event, a checkpoint or a change of state; numbered from 0 within its run."""

    seq: int
    kind: str
    attempt: int
    rank: int = -1
    data: dict[str, Any] = field(default_factory=dict)
    rows: bytes = b""

    @property
    def size_bytes(self) -> int:
        """About how much memory the frame takes."""
        return _REPORT_BYTES + len(self.rows) if self.kind == REPORTS else _OTHER_BYTES

    @property
    def is_sample(self) -> bool:
        """Whether the frame is a measurement of a worker's process, of which there are many."""
        return self.kind == EVENT and self.data.get("kind") == "sample"
