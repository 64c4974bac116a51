"""Finds runs by what a user calls them, and reads their state from their files. Driver side, without pandas."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd.cli import cluster
from raysgd.config.argument_names import nearest
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError, RaySGDError
from raysgd.result import AUTOMATIC_KEYS, DATA_WAIT_FRACTION, Event, RunStatus

if TYPE_CHECKING:
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.controller.frames import Frame

_RUN_FOLDER = re.compile(r"run_\d+", re.ASCII)
#: How a run's end is called, in `raysgd.trainer.run_folder.LoadedRun` and here.
UNFINISHED = "unfinished"
_LEFT_OUT = AUTOMATIC_KEYS | {DATA_WAIT_FRACTION}


@dataclass(frozen=True)
class RunState:
    """The state of a run, by its files, and by the cluster if that was asked.

    Attributes:
        name: The last two parts of the folder, such as ``exp/run_001``.
        run_dir: The folder.
        state: That of `raysgd.result.RunStatus` for a run that is live in the cluster; else its outcome, or ``"unfinished"``:
            the run has no end, because it is live, or was lost.
        alias: The name for ``raysgd attach``, if the run is live and detached.
        iteration: The number of its last complete round.
        metrics: The metrics of that round.
        world_size: The workers of its last attempt.
        num_failures: The failures so far.
        started_s: When it began, in seconds since the epoch; 0 if that is not known.
        ended_s: When it ended, or when its files were last added to.
        description: The content of ``run.json``.
        events: Its events, oldest first.
    """

    name: str
    run_dir: str
    state: str
    alias: str | None = None
    iteration: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    world_size: int = 0
    num_failures: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    description: dict[str, Any] = field(default_factory=dict, repr=False)
    events: list[Event] = field(default_factory=list, repr=False)

    def first_metric(self) -> str | None:
        """Return the name of the first metric that is a number, or None."""
        from raysgd._util.metric_names import flatten

        found = (name for name, value in flatten(self.metrics).items() if _is_number(value) and name not in _LEFT_OUT)
        return next(found, None)

    def metric_names(self) -> list[str]:
        """Return the names of its metrics, ``val/loss`` for a nested one."""
        from raysgd._util.metric_names import flatten

        return list(flatten(self.metrics))

    def metric(self, name: str) -> Any:
        """Return the last value of a metric, ``val/loss`` for a nested one; None if it has none."""
        from raysgd._util.metric_names import flatten

        return flatten(self.metrics).get(name)

    @property
    def message(self) -> str:
        """The text of the run's end, such as its error; empty without one."""
        ends = [str(event.data.get("message") or "") for event in self.events if event.kind == "run_end"]
        return ends[-1] if ends else ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that programs want."""
        names = ("name", "run_dir", "state", "alias", "iteration", "world_size", "num_failures", "started_s", "ended_s")
        return {**{name: getattr(self, name) for name in names}, "metrics": self.metrics}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -- folders -----------------------------------------------------------------------------------------------------------


def open_folder(path: str) -> Storage:
    """Open a folder by its path or URI. Errors as for `raysgd.checkpoint.storage.storage.Storage.from_uri`."""
    from raysgd.checkpoint.storage.storage import Storage

    return Storage.from_uri(path)


def existing_folder(path: str) -> Storage:
    """Open a folder as `open_folder` does; it need not exist.

    Raises:
        ConfigError: It is a file.
    """
    folder = open_folder(path)
    if folder.exists() and not folder.is_folder(""):
        raise ConfigError(f"{path} is a file; give a folder. `raysgd ls` lists the folders of runs.")
    return folder


def is_run(folder: Storage) -> bool:
    """Return whether a folder is that of a run."""
    try:
        return folder.exists("run.json") or folder.exists("events.jsonl") or folder.exists("events-0000.jsonl")
    except CheckpointCorruptError:  # a symbolic link in place of a file: who reads the run says so
        return True


def list_runs(folder: Storage) -> Iterator[Storage]:
    """Yield the folders of the runs in a folder: itself, those of a Trainer, or those of all Trainers in a storage path."""
    if is_run(folder):
        yield folder
        return
    for name in folder.list_names():
        try:
            child = folder.child(name)
            is_folder = folder.is_folder(name)
        except ConfigError:  # a folder that raysgd did not make, such as one with a blank in its name
            continue
        except CheckpointCorruptError:  # a symbolic link, such as `last` and `best` of a declarative training
            continue
        if _RUN_FOLDER.fullmatch(name):
            if is_run(child):
                yield child
        elif is_folder:
            numbered = [each for each in child.list_names() if _RUN_FOLDER.fullmatch(each)]
            yield from (run for each in numbered if is_run(run := child.child(each)))


def newest_run(folder: Storage) -> Storage | None:
    """Return the folder itself if it is a run's, or the newest run in a Trainer's folder, or None."""
    if is_run(folder):
        return folder
    if not folder.is_folder(""):
        return None
    numbers = sorted(int(name[4:]) for name in folder.list_names() if _RUN_FOLDER.fullmatch(name))
    runs = (folder.child(f"run_{number:03d}") for number in reversed(numbers))
    return next((run for run in runs if is_run(run)), None)


def find_run(given: str, storage_path: str, address: str | None = None) -> Storage:
    """Return the folder of the run that a user means.

    Args:
        given: The folder of a run; that of a Trainer, for its newest run; a name in the storage path, such as ``exp`` or
            ``exp/run_002``; or the name of a detached Trainer.
        storage_path: The folder of all runs.
        address: The cluster, which is asked for detached Trainers.

    Raises:
        ConfigError: There is no such run; the message names the nearest.
    """
    if (found := newest_run(existing_folder(given))) is not None:
        return found
    names: list[str] = []
    if "://" not in given and not given.startswith(("/", "~", ".")):
        runs = open_folder(storage_path)
        parts = [part for part in given.split("/") if part]
        with contextlib.suppress(ConfigError):  # such as two dots, which no folder is called
            if parts and (found := newest_run(runs.child(*parts))) is not None:
                return found
        names = runs.list_names()
        if (run_dir := _run_dir_of(given, address)) is not None:
            return open_folder(run_dir)
    raise ConfigError(
        f"there is no run {given}: it is neither the folder of a run, nor a name in {open_folder(storage_path).path_of('')}"
        f"{nearest(given, names)}, nor a detached Trainer of a running cluster; `raysgd ls` lists the runs."
    )


def _run_dir_of(alias: str, address: str | None) -> str | None:
    if cluster.connect(address) is None:
        return None
    statuses = (trainer.status for trainer in cluster.live_trainers() if trainer.alias == alias)
    return next((status.run_dir for status in statuses if status is not None and status.run_dir), None)


# -- states ------------------------------------------------------------------------------------------------------------


def read_state(folder: Storage) -> RunState:
    """Read the state of a run from its files.

    Raises:
        CheckpointNotFoundError: The folder is not that of a run.
        CheckpointCorruptError: Its files are damaged.
        StorageError: Its files cannot be read.
    """
    from raysgd.controller.journal.journal import reading

    with reading(folder):
        return _read_state(folder)


def _read_state(folder: Storage) -> RunState:
    from raysgd.controller import frames
    from raysgd.controller.journal.journal import read_description, stored_events
    from raysgd.controller.rounds import check_reduce

    description = read_description(folder)
    try:
        sequence = stored_events(folder)
    except CheckpointNotFoundError:  # the run has only begun
        sequence = []
    reduce = check_reduce(description.get("reduce"))
    last = _newest_round(folder, sequence, reduce)
    if last is None:
        last = _merge_rounds(folder, reduce)
    events = [Event(**frame.data) for frame in sequence if frame.kind == frames.EVENT]
    ends = [event.data["kind"] for event in events if event.kind == "run_end"]
    attempts = [event.data for event in events if event.kind == "attempt_start"]
    rounds = [int(attempt.get("iterations_before", 0)) for attempt in attempts]
    times = [event.timestamp for event in events] + ([last["timestamp"]] if last else [])
    return RunState(
        name="/".join(folder.path_of("").rstrip("/").split("/")[-2:]),
        run_dir=folder.path_of(""),
        state=ends[-1] if ends else UNFINISHED,
        iteration=max(
            [int(last.get("training_iteration", 0)), *rounds[-1:]]
        ),  # a resumed run may not have reported yet
        metrics=dict(last),
        world_size=attempts[-1]["world_size"] if attempts else 0,
        num_failures=sum(event.kind == "failure" for event in events),
        started_s=float(description.get("started") or (times[0] if times else 0.0)),
        ended_s=max(times, default=0.0),
        description=description,
        events=events,
    )


def _newest_round(folder: Storage, sequence: Sequence[Frame], reduce: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the last complete round from the end of the files; None if they must be read from their begin.

    That is so where ranks have made different numbers of reports when they ended, and after an attempt that was cut off.
    """
    from raysgd._util.json import decode_rows
    from raysgd.controller import frames
    from raysgd.controller.journal.journal import last_reports
    from raysgd.controller.rounds import reduce_metrics, replicas_of

    attempts = [frame for frame in sequence if frame.kind == frames.ATTEMPT]
    if not attempts:
        return {}
    attempt = attempts[-1]
    size, number = attempt.data["world_size"], attempt.attempt
    tail: dict[int, list[Frame]] = {}  # of each rank, newest first
    for frame in last_reports(folder):
        if frame.attempt != number or _reaches_back(tail, size):
            break
        tail.setdefault(frame.rank, []).append(frame)
    has_end = any(
        frame.attempt == number and frame.kind in (frames.RANK_DONE, frames.ATTEMPT_END) for frame in sequence
    )
    if not _reaches_back(tail, size) or (has_end and len({_end_of(reports[0]) for reports in tail.values()}) > 1):
        return None
    count = min(_end_of(reports[0]) for reports in tail.values())
    rows = []
    for rank in range(size):
        reports = next(each for each in tail[rank] if each.data["first"] < count)
        rows.append(decode_rows(reports.rows)[count - 1 - reports.data["first"]])
    replicas = replicas_of(range(size), attempt.data.get("workers_per_replica", 1))
    metrics = reduce_metrics([row[2] for row in rows], reduce, replicas)
    automatic = {"training_iteration": attempt.data["iterations_before"] + count, "timestamp": rows[0][0]}
    return {**metrics, **automatic, "time_total_s": rows[0][1], "world_size": size, "attempt": number}


def _reaches_back(tail: Mapping[int, Sequence[Frame]], size: int) -> bool:
    """Return whether the newest reports of all ranks have the last round that all have made."""
    if len(tail) < size:
        return False
    count = min(_end_of(reports[0]) for reports in tail.values())
    return all(reports[-1].data["first"] < count for reports in tail.values())


def _end_of(reports: Frame) -> int:
    """Return the number of reports that a rank has made after these."""
    return int(reports.data["first"] + reports.data["count"])


def _merge_rounds(folder: Storage, reduce: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the last complete round, from all files; empty if there is none."""
    from raysgd.controller.journal.journal import stored_frames
    from raysgd.controller.rounds import RoundMerger

    merger = RoundMerger(reduce)
    last: Mapping[str, Any] = {}
    for frame in stored_frames(folder):
        for result in merger.feed(frame):
            last = result
    return last


def read_events(folder: Storage) -> list[Event]:
    """Read the events of a run, oldest first; none if it has only begun. Errors as for `read_state`."""
    from raysgd.controller import frames
    from raysgd.controller.journal.journal import reading, stored_events

    try:
        with reading(folder):
            return [Event(**frame.data) for frame in stored_events(folder) if frame.kind == frames.EVENT]
    except CheckpointNotFoundError:
        return []


def read_states(folder: Storage) -> tuple[list[RunState], list[str]]:
    """Read the states of all runs in a folder, newest first; return them, and a line for each that cannot be read."""
    states, problems = [], []
    for run in list_runs(folder):
        try:
            states.append(read_state(run))
        except RaySGDError as error:  # such as damaged files
            problems.append(f"{run.path_of('')} cannot be read: {error}")
    return sorted(states, key=lambda state: state.started_s, reverse=True), problems


def with_live(states: list[RunState], trainers: list[cluster.LiveTrainer]) -> list[RunState]:
    """Return the states with what the cluster says of runs that are live; runs in other folders are added, first."""
    from raysgd.trainer.channel import OVER

    live = {
        _key(trainer.status.run_dir): trainer
        for trainer in trainers
        if trainer.status is not None and trainer.status.run_dir
    }
    merged = []
    for state in states:
        trainer = live.pop(_key(state.run_dir), None)
        merged.append(
            state if trainer is None or trainer.status is None else _merge(state, trainer.status, trainer.alias)
        )
    added = []
    for trainer in live.values():
        status = trainer.status
        if status is not None and status.state not in OVER:
            name = "/".join(_key(status.run_dir).split("/")[-2:])
            added.append(
                _merge(RunState(name, status.run_dir, status.state, ended_s=time.time()), status, trainer.alias)
            )
    return added + merged


def _merge(state: RunState, status: RunStatus, alias: str | None) -> RunState:
    from dataclasses import replace

    return replace(
        state,
        state=status.state,
        alias=alias,
        iteration=max(state.iteration, status.iteration),
        world_size=status.world_size or state.world_size,
        num_failures=max(state.num_failures, status.num_failures),
    )


def _key(run_dir: str) -> str:
    """Return what is equal for the same folder, with and without the options of its URI."""
    from raysgd._util.redact import redact_uri

    return redact_uri(run_dir.partition("?")[0]).rstrip("/")
