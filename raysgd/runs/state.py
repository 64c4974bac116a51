"""The state of a run by its files, without reading all reports: what ``raysgd ls`` and the list of the page show."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd._util.json import decode_rows
from raysgd._util.metric_names import flatten
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import SILENT_S, last_reports, read_description, reading, stored_frames
from raysgd.controller.rounds import RoundMerger, check_reduce, reduce_metrics, replicas_of
from raysgd.errors import CheckpointNotFoundError
from raysgd.result import AUTOMATIC_KEYS, DATA_WAIT_FRACTION, Event
from raysgd.runs.annotations import Annotations, read_annotations
from raysgd.runs.finding import run_name
from raysgd.runs.reading import outcome_of
from raysgd.runs.tail import JournalTail

_LEFT_OUT = AUTOMATIC_KEYS | {DATA_WAIT_FRACTION}


@dataclass(frozen=True)
class RunState:
    """The state of a run, by its files, and by the cluster if that was asked.

    Attributes:
        name: The last two parts of the folder, such as ``exp/run_001``.
        run_dir: The folder.
        state: The outcome; of a run without an end, that of `raysgd.result.RunStatus` if the cluster was asked and has it, or
            by its files ``"paused"``, ``"live"``, or ``"silent"``: it was lost, or its cluster does not write its files now.
        alias: The name for ``raysgd attach``, if the run is live and detached.
        is_live: The cluster that was asked has it.
        iteration: The number of its last complete round.
        metrics: The metrics of that round.
        world_size: The workers of its last attempt; 0 while it is paused.
        num_failures: The failures so far.
        started_s: When it began, in seconds since the epoch; 0 if that is not known.
        ended_s: When it ended, or when its files were last added to.
        annotations: Its title, tags and notes.
        description: The content of ``run.json``.
        events: Its events without samples, oldest first.
    """

    name: str
    run_dir: str
    state: str
    alias: str | None = None
    is_live: bool = False
    iteration: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    world_size: int = 0
    num_failures: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    annotations: Annotations = field(default_factory=Annotations)
    description: dict[str, Any] = field(default_factory=dict, repr=False)
    events: list[Event] = field(default_factory=list, repr=False)

    @property
    def own_metrics(self) -> dict[str, Any]:
        """The metrics that train_func reported, by name, ``val/loss`` for a nested one."""
        return {name: value for name, value in flatten(self.metrics).items() if name not in _LEFT_OUT}

    @property
    def message(self) -> str:
        """The text of the run's end, such as its error; empty without one."""
        ends = [str(event.data.get("message") or "") for event in self.events if event.kind == "run_end"]
        return ends[-1] if ends else ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that programs want."""
        names = ("name", "run_dir", "state", "alias", "iteration", "world_size", "num_failures", "started_s", "ended_s")
        return {**{name: getattr(self, name) for name in names}, **vars(self.annotations), "metrics": self.metrics}


def read_state(folder: Storage) -> RunState:
    """Read the state of a run once; see `StateReader.read`."""
    return StateReader(folder).read()


def state_by_files(outcome: str | None, *, is_paused: bool, last_s: float) -> str:
    """Return the state of a run by its files, whose last frame is of the time ``last_s``; see `RunState`."""
    return outcome or ("paused" if is_paused else "live" if time.time() - last_s < SILENT_S else "silent")


def is_paused(events: Sequence[Event]) -> bool:
    """Return whether a run is paused by its events."""
    return next((event.kind for event in reversed(events) if event.kind in ("paused", "resumed")), "") == "paused"


class StateReader:
    """Reads the state of a run, again and again: each time what is new in its events, and the end of its reports.

    Args:
        folder: The run's folder.

    Attributes:
        events: The events so far, without samples, oldest first.
    """

    def __init__(self, folder: Storage) -> None:
        self.events: list[Event] = []
        self._folder = folder
        self._tail = JournalTail(folder, reports=False, samples=False)
        self._sequence: list[Frame] = []
        self._first_s = self._last_s = 0.0
        self._description: dict[str, Any] = {}
        self._round: tuple[Any, Mapping[str, Any]] = None, {}

    def update(self) -> None:
        """Read the new events; none if the run has only begun. Errors as for `read`."""
        with reading(self._folder):
            try:
                new = self._tail.read()
            except CheckpointNotFoundError:
                if not self._folder.exists("run.json"):
                    raise
                return
            for frame in new:
                if frame.kind != frames.EVENT:
                    self._sequence.append(frame)
                    continue
                event = Event(**frame.data)
                self._first_s = self._first_s or event.timestamp
                self._last_s = max(self._last_s, event.timestamp)
                if event.kind != "sample":
                    self.events.append(event)

    def read(self) -> RunState:
        """Return the state of the run. Blocks.

        Raises:
            CheckpointNotFoundError: The folder is not that of a run.
            CheckpointCorruptError: Its files are damaged.
            StorageError: Its files cannot be read.
        """
        self.update()
        with reading(self._folder):
            return self._state()

    def _state(self) -> RunState:
        folder, events = self._folder, self.events
        self._description = self._description or read_description(folder)
        last = self._newest_round()
        attempts = [event.data for event in events if event.kind == "attempt_start"]
        before = [int(attempt.get("iterations_before", 0)) for attempt in attempts]
        paused = is_paused(events)
        ended_s = max(self._last_s, last.get("timestamp", 0.0))
        return RunState(
            name=run_name(folder),
            run_dir=folder.path_of(""),
            state=state_by_files(outcome_of(events), is_paused=paused, last_s=ended_s),
            iteration=max([int(last.get("training_iteration", 0)), *before[-1:]]),  # it may not have reported since
            metrics=dict(last),
            world_size=attempts[-1]["world_size"] if attempts and not paused else 0,
            num_failures=sum(event.kind == "failure" for event in events),
            started_s=float(self._description.get("started") or self._first_s or last.get("timestamp", 0.0)),
            ended_s=ended_s,
            annotations=read_annotations(folder),
            description=self._description,
            events=list(events),
        )

    def _newest_round(self) -> Mapping[str, Any]:
        newest = next(last_reports(self._folder), None)
        files = (len(self._sequence), None if newest is None else newest.seq)
        if files != self._round[0]:
            reduce = check_reduce(self._description.get("reduce"))
            last = _newest_round(self._folder, self._sequence, reduce)
            self._round = files, _merge_rounds(self._folder, reduce) if last is None else last
        return self._round[1]


def _newest_round(folder: Storage, sequence: Sequence[Frame], reduce: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the last complete round from the end of the files; None if they must be read from their begin.

    That is so where ranks have made different numbers of reports when they ended, and after an attempt that was cut off.
    """
    attempts = [frame for frame in sequence if frame.kind == frames.ATTEMPT]
    if not attempts:
        return {}
    attempt = attempts[-1]
    size = attempt.data["world_size"]
    ends: dict[int, int] = {}  # the reports that each rank has made
    rows: dict[int, dict[int, Any]] = {}  # of each rank, by the number of the report
    for frame in last_reports(folder):
        if frame.attempt != attempt.attempt:
            return None
        first = frame.data["first"]
        ends.setdefault(frame.rank, first + frame.data["count"])
        rows.setdefault(frame.rank, {}).update(enumerate(decode_rows(frame.rows), first))
        last = min(ends.values()) - 1
        if len(rows) == size and all(last in found for found in rows.values()):
            break
    else:
        return None
    ended = {frame.attempt for frame in sequence if frame.kind in (frames.RANK_DONE, frames.ATTEMPT_END)}
    if attempt.attempt in ended and len(set(ends.values())) > 1:
        return None
    chosen = [rows[rank][last] for rank in range(size)]
    replicas = replicas_of(range(size), attempt.data.get("workers_per_replica", 1))
    metrics = reduce_metrics([row[2] for row in chosen], reduce, replicas)
    automatic = {"training_iteration": attempt.data["iterations_before"] + last + 1, "timestamp": chosen[0][0]}
    return {**metrics, **automatic, "time_total_s": chosen[0][1], "world_size": size, "attempt": attempt.attempt}


def _merge_rounds(folder: Storage, reduce: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the last complete round, from all files; empty if there is none."""
    merger = RoundMerger(reduce)
    last = deque((result for frame in stored_frames(folder) for result in merger.feed(frame)), maxlen=1)
    return last[0] if last else {}
