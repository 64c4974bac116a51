"""What a worker's stream carries to the controller: one ordered sequence per rank of these plain records.

They hold built-in types and bytes only: user objects cross the controller as bytes it never unpickles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entered:
    """train_func was entered, at ``timestamp`` (seconds since the epoch)."""

    timestamp: float


@dataclass(frozen=True)
class Reports:
    """Reports ``first`` to ``first + count - 1`` of this rank in this attempt, counted from 0.

    Attributes:
        rows: JSON, a list of ``[timestamp, time_total_s, {metrics}]``, encoded once here and passed on unparsed.
    """

    first: int
    count: int
    rows: bytes


@dataclass(frozen=True)
class Saved:
    """The rank made its ``call``-th ``save_checkpoint`` of the attempt, counted from 0; its bytes are not safe yet.

    Attributes:
        reports: Reports this rank had made in the attempt before the call.
        time_total_s: Training time up to the call.
        metrics: JSON of the metrics given, or of this rank's last report before; None if there is neither.
    """

    call: int
    reports: int
    time_total_s: float
    all_ranks: bool
    is_files: bool
    trusted: bool
    metrics: bytes | None


@dataclass(frozen=True)
class Scored:
    """The first report after save ``call`` in a loop that saves first: the round that checkpoint belongs to.

    Attributes:
        metrics: JSON of what was reported; None where the save was given ``metrics=`` of its own.
        time_total_s: Training time up to the report.
    """

    call: int
    metrics: bytes | None
    time_total_s: float = 0.0


@dataclass(frozen=True)
class PartSafe:
    """This rank's part of save ``call`` is durable: ``(name, size, crc32)`` of each file, and its small state.

    Attributes:
        beside: Digest of what it has beside the pieces of arrays; None where it has no pieces.
    """

    call: int
    files: tuple[tuple[str, int, int], ...]
    rank_state: dict[str, Any] = field(default_factory=dict)
    beside: str | None = None


@dataclass(frozen=True)
class PartFailed:
    """Writing this rank's part of save ``call`` failed for good."""

    call: int
    error: str


@dataclass(frozen=True)
class PartHeld:
    """This rank's part of save ``call`` is in the cluster's memory, and its small state. ``beside``: as in `PartSafe`."""

    call: int
    num_bytes: int
    rank_state: dict[str, Any] = field(default_factory=dict)
    beside: str | None = None


@dataclass(frozen=True)
class HoldFailed:
    """This rank's part of save ``call`` will not be in the cluster's memory."""

    call: int
    error: str


@dataclass(frozen=True)
class StartUnusable:
    """The checkpoint that the attempt goes on from is not what its manifest says, or is gone."""

    error: str


@dataclass(frozen=True)
class AtSavePoint:
    """The rank has made save ``call``, which all ranks leave after, and waits; see `raysgd.session.savegate`."""

    call: int


@dataclass(frozen=True)
class Sample:
    """A look at the worker's process: CPU, memory, GPU, pace of reports."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Warned:
    """Something the user should know that does not end anything."""

    message: str


@dataclass(frozen=True)
class StopWanted:
    """A callback in the worker wants the run to end."""

    why: str


@dataclass(frozen=True)
class Preempted:
    """The worker's process was told to end, and goes on for as long as it is let."""

    why: str


@dataclass(frozen=True)
class Returned:
    """train_func returned. ``value`` is its pickle; None means that it is the stream's next item instead (it is large).

    Attributes:
        saw_stop: It had found ``should_stop()`` true.
    """

    value: bytes | None
    size_bytes: int
    saw_stop: bool = False


@dataclass(frozen=True)
class Ended:
    """train_func left because its attempt was ended from outside."""


@dataclass(frozen=True)
class Parked:
    """train_func has left its attempt and its group, and waits for the next ones; see `raysgd.workers.entry`.

    Attributes:
        failed: Why it could not join the group of the attempt, if that is what happened.
        iteration: Rounds of the run after which its state stands, if it knows that.
        is_broken: Its group was; otherwise it was told that the members are to change.
    """

    failed: Failed | None = None
    iteration: int | None = None
    is_broken: bool = True


@dataclass(frozen=True)
class Failed:
    """train_func, or setting up its group, raised.

    Attributes:
        exception: Pickle of the exception, or None where it does not pickle.
        type_name: Qualified name of its type.
        summary: One line.
        traceback: The formatted traceback, secrets redacted.
        timestamp: When it was caught, seconds since the epoch.
        in_collective: It looks like the consequence of a peer's failure, not a cause.
        in_setup: It happened before train_func was entered.
    """

    exception: bytes | None
    type_name: str
    summary: str
    traceback: str
    timestamp: float
    in_collective: bool = False
    in_setup: bool = False


WorkerEvent = (
    Entered
    | Reports
    | Saved
    | Scored
    | PartSafe
    | PartFailed
    | PartHeld
    | HoldFailed
    | StartUnusable
    | AtSavePoint
    | Sample
    | Warned
    | StopWanted
    | Preempted
    | Returned
    | Ended
    | Parked
    | Failed
)
