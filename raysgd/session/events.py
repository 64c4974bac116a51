"""What a worker's stream carries to the controller: plain records, in one ordered sequence per rank.

The records hold built-in types and bytes only. The user's objects cross the controller as bytes, which it never unpickles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysgd.checkpoint.storage.names import FileEntry
from raysgd.transport import Endpoint


@dataclass(frozen=True)
class OutputFile:
    """A file that a process prints to, and its size in bytes at that moment."""

    path: str
    size: int


def describe_output(files: tuple[OutputFile, ...]) -> dict[str, Any]:
    """Return what the record of an event says of the files that a process prints to."""
    return {"output": [[file.path, file.size] for file in files]} if files else {}


@dataclass(frozen=True)
class Entered:
    """train_func was entered at ``timestamp`` (seconds since the epoch).

    Attributes:
        output: The files of the process's stdout and stderr; empty if they are not files.
    """

    timestamp: float
    output: tuple[OutputFile, ...] = ()


@dataclass(frozen=True)
class Left:
    """train_func was left; ``output`` is as in `Entered`, the others are as `Progress` has them.

    Attributes:
        after: What the time since the newest step began was used for: what follows the loop belongs to no step.
    """

    output: tuple[OutputFile, ...] = ()
    steps: int = 0
    uses: dict[str, float] = field(default_factory=dict)
    work: dict[str, Any] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return what the run's record says of it."""
        after = {"after": self.after} if self.after else {}
        return {"steps": self.steps, "uses": self.uses, **self.work, **after, **describe_output(self.output)}


@dataclass(frozen=True)
class Reports:
    """The reports ``first`` to ``first + count - 1`` of this rank in this attempt, counted from 0.

    Attributes:
        rows: JSON, a list of ``[timestamp, time_total_s, {metrics}]``. The worker encodes it; readers decode it.
        closes: In a loop that saves first, the first report after each save, and the save's call: the checkpoint belongs to
            the round of that report.
    """

    first: int
    count: int
    rows: bytes
    closes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Saved:
    """The rank made its ``call``-th ``save_checkpoint`` of the attempt, counted from 0. Its files are not durable yet.

    Attributes:
        reports: Reports that this rank made in the attempt before the call.
        time_total_s: Training time up to the call.
        metrics: JSON of the metrics given, or of this rank's last report before; None if there is neither.
        awaits_round: The loop saves before it reports: the checkpoint belongs to the round that is reported next.
    """

    call: int
    reports: int
    time_total_s: float
    all_ranks: bool
    is_files: bool
    allow_pickle: bool
    metrics: bytes | None
    awaits_round: bool = False


@dataclass(frozen=True)
class PartSafe:
    """This rank's part of save ``call`` is durable: its files, and its small state.

    Attributes:
        unsharded_digest: Digest of everything in the part except array shards; None where it has no shards.
        seconds: How long that took, from the rank's call.
    """

    call: int
    files: tuple[FileEntry, ...]
    rank_state: dict[str, Any] = field(default_factory=dict)
    unsharded_digest: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class PartFailed:
    """Writing this rank's part of save ``call`` failed for good."""

    call: int
    error: str


@dataclass(frozen=True)
class PartHeld:
    """This rank's part of save ``call`` is in the cluster's memory.

    Attributes:
        unsharded_digest: As in `PartSafe`.
    """

    call: int
    num_bytes: int
    rank_state: dict[str, Any] = field(default_factory=dict)
    unsharded_digest: str | None = None


@dataclass(frozen=True)
class HoldFailed:
    """This rank's part of save ``call`` will not be in the cluster's memory."""

    call: int
    error: str


@dataclass(frozen=True)
class StartUnusable:
    """The checkpoint that the attempt starts from does not match its manifest, or is gone."""

    error: str


#: The marks of a rank that may be needed: after the chosen step and the one after it, and after passes in the steps that follow.
#: See `add_mark`.
NUM_MARKS = 5

#: Saves from this number on are copies of a live state.
COPY_CALLS = 1 << 62


class StepId(NamedTuple):
    """A step: the number of its attempt, and how many steps of that attempt are complete with it. Later ones are greater."""

    attempt: int
    step: int

    @property
    def copy_call(self) -> int:
        """The number of the save that copies the state after this step to the cluster's memory."""
        return COPY_CALLS + (self.attempt << 32) + self.step

    @classmethod
    def of_copy(cls, number: int) -> StepId:
        """Return the step whose state a save, or the checkpoint that it makes, has copied."""
        return cls(*divmod(number - COPY_CALLS, 1 << 32))


def is_copy(number: int) -> bool:
    """Whether the number of a save, or of a checkpoint, is that of a copy of a live state, which is in memory alone."""
    return number >= COPY_CALLS


def describe_checkpoint(number: int) -> str:
    """Return how messages name a checkpoint, or a copy of a live state."""
    return f"the memory copy of step {StepId.of_copy(number).step}" if is_copy(number) else f"checkpoint {number}"


@dataclass(frozen=True)
class Mark:
    """The progress of a rank that has a live state.

    Attributes:
        step: Complete steps of the attempt.
        small: The small state that belongs to this rank alone, as JSON; None: as in the mark before.
        is_in_step: The forward pass of the next step is over; ``small`` is the state after it.
        is_settled: In no step so far, and there was one in this attempt or before, has the small state changed after the forward
            pass.
    """

    step: int
    small: bytes | None
    is_in_step: bool = False
    is_settled: bool = False


def add_mark(marks: deque[Mark], mark: Mark) -> None:
    """Add a mark to the last ones. Of the passes of a step only the last one counts."""
    if marks and marks[-1].is_in_step and mark.is_in_step:
        marks.pop()
    marks.append(mark)


@dataclass(frozen=True)
class HeldStep:
    """A complete step whose state, or a piece of it, is in a worker's memory, unchanged since.

    Attributes:
        iteration: Rounds of the run up to the step.
        num_saves: Calls of ``save_checkpoint`` in the attempt up to the step.
        positions: The positions in the datasets, which are the same on all ranks.
        place: How often it was recorded again, after what a loop does between steps. Ranks are alike at the same place only.
        piece: The piece of the state, as in ``pieces``.
        pieces: The piece of each rank, named by the first rank that holds it; empty if each rank holds the whole state.
    """

    id: StepId
    iteration: int = 0
    time_total_s: float = 0.0
    num_saves: int = 0
    positions: Mapping[str, Any] = field(default_factory=dict)
    place: int = 0
    piece: int = 0
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True)
class LiveReport:
    """The answer of a process about the live state of the last attempt in which it took part.

    Attributes:
        rank: Its rank in that attempt.
        attempt: The number of that attempt.
        marks: Its last marks, oldest first.
        held: The step that it holds; None if its state was being changed when it left train_func.
        endpoint: Where other workers can copy the state from.
        problem: Why its loop, one of raysgd, has no live state.
    """

    rank: int
    attempt: int
    marks: tuple[Mark, ...] = ()
    held: HeldStep | None = None
    endpoint: Endpoint | None = None
    problem: str | None = None


@dataclass(frozen=True)
class HoldsState:
    """The rank has a live state, whose first step in this attempt is complete."""


@dataclass(frozen=True)
class Marked:
    """The last marks of a rank that has left, or whose process died, oldest first."""

    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class AtSavePoint:
    """The rank waits after save ``call``, from 0, which all ranks leave after; see `raysgd.session.gates`.

    ``point`` is the number of the request, from 1: save points are cancelled and requested again.
    """

    call: int
    point: int


@dataclass(frozen=True)
class Sample:
    """A measurement of the worker's process: CPU, memory, GPU, rate of reports."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Warned:
    """A warning for the user that does not end anything."""

    message: str


@dataclass(frozen=True)
class Unsynchronized:
    """This rank trains a model that shares nothing with those of other ranks. ``message``: the warning, if all ranks do."""

    message: str


@dataclass(frozen=True)
class StopRequested:
    """A callback in the worker asks the run to end."""

    why: str


@dataclass(frozen=True)
class Preempted:
    """The worker's process got SIGTERM; it keeps running until it is killed."""

    why: str


@dataclass(frozen=True)
class Returned:
    """train_func returned. ``value`` is its pickle, or None if it is large: then it is the stream's next item.

    Attributes:
        saw_stop: train_func had found ``should_stop()`` true.
    """

    value: bytes | None
    size_bytes: int
    saw_stop: bool = False


@dataclass(frozen=True)
class Ended:
    """train_func left because its attempt was ended from outside."""


@dataclass(frozen=True)
class Failed:
    """train_func, or setting up its process group, raised.

    Attributes:
        exception: Pickle of the exception, or None where it does not pickle.
        type_name: Qualified name of its type.
        summary: One line.
        traceback: The formatted traceback, with secrets redacted.
        timestamp: When it was caught, seconds since the epoch.
        in_collective: It is likely the consequence of a peer's failure, not a cause.
        in_setup: It happened before train_func was entered.
        can_retry: Its class is in ``FailureConfig(retry_on=...)``.
    """

    exception: bytes | None
    type_name: str
    summary: str
    traceback: str
    timestamp: float
    in_collective: bool = False
    in_setup: bool = False
    can_retry: bool = False


WorkerEvent = (
    Entered
    | Left
    | Reports
    | Saved
    | PartSafe
    | PartFailed
    | PartHeld
    | HoldFailed
    | StartUnusable
    | HoldsState
    | Marked
    | AtSavePoint
    | Sample
    | Warned
    | Unsynchronized
    | StopRequested
    | Preempted
    | Returned
    | Ended
    | Failed
)
