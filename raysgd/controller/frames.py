"""The frames of a run: the numbered sequence that the controller sends to readers (the driver, the callback host).

A frame is made once and sent to every reader. The reports in it stay as the worker encoded them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from raysgd._util.json import decode_rows

ATTEMPT = "attempt"  # data: attempt, world_size, iterations_before, time_before_s
REPORTS = "reports"  # rank, rows; data: first, count, and closes in a loop that saves first, see `closings_of`
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
#: Decoded rows take about this many times the memory of encoded ones.
_DECODED = 10


@dataclass(frozen=True)
class Frame:
    """One step of a run: reports, an event, a checkpoint or a change of state; numbered from 0 within its run."""

    seq: int
    kind: str
    attempt: int
    rank: int = -1
    data: dict[str, Any] = field(default_factory=dict)
    rows: bytes = b""

    @cached_property
    def decoded(self) -> list[list[Any]]:
        """The reports, ``[timestamp, time_total_s, metrics]``: decoded once in a process, however many read them there."""
        return decode_rows(self.rows)

    @property
    def size_bytes(self) -> int:
        """About how much memory the frame takes."""
        if self.kind != REPORTS:
            return _OTHER_BYTES
        return _REPORT_BYTES + len(self.rows) * (1 + _DECODED * ("decoded" in self.__dict__))

    @property
    def is_sample(self) -> bool:
        """Whether the frame is a measurement of a worker's process, of which there are many."""
        return self.kind == EVENT and self.data.get("kind") == "sample"


class Closing(NamedTuple):
    """A rank's report of the round that a checkpoint belongs to, in a loop that saves before it reports.

    Attributes:
        number: The checkpoint's number.
        report: The report's number in its attempt, from 0.
        time_total_s: Seconds of training up to the report.
        metrics: What was reported.
    """

    number: int
    report: int
    time_total_s: float
    metrics: dict[str, Any]


def closings_of(data: dict[str, Any], rows: bytes) -> tuple[Closing, ...]:
    """Return the reports that checkpoints belong to; ``data["closes"]`` pairs the number of each with that of its checkpoint."""
    if not (closes := data.get("closes")):
        return ()
    made = decode_rows(rows)
    return tuple(Closing(number, report, *made[report - data["first"]][1:3]) for report, number in closes)
