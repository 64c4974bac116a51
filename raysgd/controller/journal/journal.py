"""The run's files: ``metrics-NNNN.jsonl`` with every report of every rank, ``events.jsonl`` (on object stores
``events-NNNN.jsonl``), ``run.json``.

The TrainerActor writes them in a thread, so that storage never blocks the event loop, and flushes within a second. On a local
disk, frames are written in their order, so what a killed TrainerActor leaves has no gap; elsewhere an event is written after
the reports before it. The journal is also the buffer between training and slow readers: `frames_from` reads back what memory no
longer holds.

A line of a metrics file is one batch of one rank, as its worker encoded it::

    {"seq": 12, "attempt": 1, "rank": 0, "first": 10, "count": 2, "rows": [[timestamp, time_total_s, {metrics}], ...]}

In a loop that saves before it reports, ``"closes": [[10, 3]]`` before the rows says that checkpoint 3 belongs to the round of
report 10.

All lines are standard JSON, which has no NaN and no infinities: these are null. A row with such metrics has a fourth element,
a line of an events file the key ``nonfinite``, which says where they were, by keys and indices, and which::

    [
        timestamp,
        time_total_s,
        {"loss": null, "val": {"loss": null}},
        [[["loss"], "NaN"], [["val", "loss"], "-Infinity"]],
    ]
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any, BinaryIO

from raysgd._util.json import decode, put_nonfinite, take_nonfinite
from raysgd._util.redact import redact, redact_texts
from raysgd.checkpoint.links import run_names
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError, RaySGDError

#: A metrics file is closed when it has this size. On object stores, which cannot append, each flush writes the open file again.
SEGMENT_BYTES = 4 << 20
#: The same for events on object stores. Events are few, and a small file is written again quickly.
EVENTS_SEGMENT_BYTES = 256 << 10

#: Seconds without a new frame after which a run without an end is no longer called live. Workers send samples every 2 s.
SILENT_S = 60.0

_LONE_EVENTS = "events.jsonl"
#: The beginning of each line, and how many bytes to read for it.
_SEQ = re.compile(rb'\{"seq":(\d+),')
_SEQ_BYTES = 32
_EVENTS_FILE = re.compile(r"events(-\d+)?\.jsonl")
_METRICS_FILE = re.compile(r"metrics-\d+\.jsonl")
_MAX_NAMED = 6
#: Bytes at the end of a file that are read at once.
_BLOCK_BYTES = 64 << 10
#: Bytes of a damaged line that a message shows.
_MAX_QUOTED = 40


class LogFile:
    """A file of lines that grows: appended to on a local disk, rewritten elsewhere.

    Attributes:
        pending: The lines to write, with the numbers of their frames.
        size_bytes: The size of the file with them.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = name
        self._storage = storage
        self.pending: deque[tuple[int, bytes]] = deque()
        self._unwritten: list[tuple[int, bytes]] = []
        self._written: list[bytes] = []
        self.size_bytes = 0

    @property
    def unwritten(self) -> list[tuple[int, bytes]]:
        """The lines that are not on storage yet, with the numbers of their frames."""
        return [*self._unwritten, *self.pending]

    @property
    def first_unwritten(self) -> int | None:
        """The number of the first frame that is not on storage yet."""
        waiting = self._unwritten or self.pending
        return waiting[0][0] if waiting else None

    def flush(self, before: int) -> None:
        """Write the frames below a number. Blocks; called by one thread at a time. After an error, the next flush writes them."""
        while self.pending and self.pending[0][0] < before:  # one by one, because another thread appends meanwhile
            self._unwritten.append(self.pending.popleft())
        if not self._unwritten:
            return
        lines = [line for _, line in self._unwritten]
        if self._storage.is_local:
            self._append(b"".join(lines))
        else:
            self._storage.write_bytes(self.name, b"".join([*self._written, *lines]))
            self._written += lines
        self._unwritten = []

    def _append(self, data: bytes) -> None:
        with open(Path(self._storage.uri) / self.name, "ab", buffering=0) as file:
            end, view = file.seek(0, os.SEEK_END), memoryview(data)
            try:
                while view:
                    view = view[file.write(view) :]
            except OSError:  # such as a full disk; the next flush writes all of it again
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise


class SegmentedLog:
    """Lines in files ``<stem>-NNNN.jsonl``; only the last file grows.

    Args:
        segment_bytes: Size at which a file is closed; None: all lines go to one file, ``<stem>.jsonl``.

    Attributes:
        segments: Number of the first frame in each file, and its name.
    """

    def __init__(self, storage: Storage, stem: str, segment_bytes: int | None) -> None:
        self.segments: list[tuple[int, str]] = []
        self._storage = storage
        self._stem = stem
        self._segment_bytes = segment_bytes
        self._num_files = 0
        self._open: LogFile | None = None
        self._closed: list[LogFile] = []

    def reopen(self) -> int:
        """Continue after the existing files, in a new one; returns the number of their last frame, -1 if there is none."""
        pattern = re.compile(rf"{self._stem}-(\d+)\.jsonl")
        found = sorted(
            (int(match[1]), match[0]) for match in map(pattern.fullmatch, self._storage.list_names()) if match
        )
        self._num_files = found[-1][0] + 1 if found else 0
        for _, name in found:
            first = self._storage.read_with(name, lambda file: _SEQ.match(file.read(_SEQ_BYTES)))
            if first is not None:  # otherwise nothing was written to the file
                self.segments.append((int(first[1]), name))
        if not self.segments:
            return -1
        first_seq, name = self.segments[-1]
        return _last_seq(self._storage.read_bytes(name), first_seq)

    def append(self, seq: int, line: bytes) -> None:
        if self._open is None or (self._segment_bytes is not None and self._open.size_bytes >= self._segment_bytes):
            self._open = self._next_file(seq)
        self._open.pending.append((seq, line))
        self._open.size_bytes += len(line)

    def flush(self, before: int) -> None:
        """Write the frames below a number. Blocks; called by one thread at a time."""
        for file in self._files():
            file.flush(before)
        while self._closed and self._closed[0].first_unwritten is None:
            self._closed.pop(0)

    def first_unwritten(self) -> int | None:
        """Return the number of the first frame that is not on storage yet."""
        numbers = (file.first_unwritten for file in self._files())
        return next((number for number in numbers if number is not None), None)

    def unwritten(self) -> dict[str, list[bytes]]:
        """Return the lines that are not on storage yet, by the name of their file."""
        return {file.name: [line for _, line in file.unwritten] for file in self._files()}

    def _files(self) -> list[LogFile]:
        """Return the files that may have frames which are not on storage, oldest first."""
        last = self._open  # another thread may begin a file meanwhile, and close this one
        closed = list(self._closed)
        return closed if last is None or last in closed else [*closed, last]

    def _next_file(self, seq: int) -> LogFile:
        if self._open is not None:
            self._closed.append(self._open)
        number = "" if self._segment_bytes is None else f"-{self._num_files:04d}"
        self._num_files += 1
        file = LogFile(self._storage, f"{self._stem}{number}.jsonl")
        self.segments.append((seq, file.name))
        return file


class Journal:
    """The files of one run.

    Secrets are removed from what is written, but not from frames, because readers need working URIs.

    Args:
        secrets: Texts to remove wherever they occur. Values under secret names, and credentials in URIs, are removed anyway.

    Attributes:
        num_reports: Number of reports that were recorded by this object.
    """

    def __init__(self, storage: Storage, secrets: Set[str] = frozenset()) -> None:
        self._storage = storage
        self._secrets = secrets
        self.num_reports = 0
        self._lock = threading.Lock()
        self._end = 0  # one more than the number of the last frame
        self._events = SegmentedLog(storage, "events", None if storage.is_local else EVENTS_SEGMENT_BYTES)
        self._metrics = SegmentedLog(storage, "metrics", SEGMENT_BYTES)

    def reopen(self) -> tuple[list[Frame], int]:
        """Continue the files of a run that another process began. Blocks.

        Returns:
            Their frames other than reports, and the number of their last frame, reports included; -1 if there is none.
        """
        names = self._storage.list_names()
        if self._storage.is_local and _LONE_EVENTS in names:
            _cut_torn_line(Path(self._storage.uri) / _LONE_EVENTS)
        found = [self._storage.read_bytes(name) for name in filter(_EVENTS_FILE.fullmatch, names)]
        events = [event_frame(line) for data in found for line in _whole_lines(data)]
        events.sort(key=lambda frame: frame.seq)
        self._events.reopen()
        return events, max(self._metrics.reopen(), events[-1].seq if events else -1)

    def write_run(self, description: dict[str, Any]) -> None:
        """Write ``run.json``. Blocks."""
        shown = redact(description, self._secrets)
        self._storage.write_bytes("run.json", json.dumps(shown, indent=2, default=str).encode())

    def append(self, frame: Frame) -> None:
        """Record a frame; it is on storage after the next `flush`."""
        if frame.kind == frames.REPORTS:
            self.num_reports += frame.data["count"]
            head = '{"seq":%d,"attempt":%d,"rank":%d,"first":%d,"count":%d%s,"rows":'
            closes = frame.data.get("closes")
            closing = f',"closes":{json.dumps(closes, separators=(",", ":"))}' if closes else ""
            values = (frame.seq, frame.attempt, frame.rank, frame.data["first"], frame.data["count"], closing)
            self._metrics.append(frame.seq, (head % values).encode() + frame.rows + b"}\n")
        else:
            self._events.append(frame.seq, _event_line(frame, self._secrets))
        self._end = frame.seq + 1

    def flush(self) -> None:
        """Write all recorded frames. Blocks; safe to call from any thread."""
        with self._lock:
            end = self._end
            if self._storage.is_local:
                self._flush_in_order(end)
            else:  # where each write replaces a file: the event that ends a run must not be there without its last reports
                self._metrics.flush(end)
                self._events.flush(end)

    def _flush_in_order(self, end: int) -> None:
        logs = (self._metrics, self._events)
        while True:
            first = [end if (number := log.first_unwritten()) is None else number for log in logs]
            if min(first) >= end:
                return
            earlier, later = (0, 1) if first[0] < first[1] else (1, 0)
            logs[earlier].flush(min(first[later], end))

    def num_unwritten(self) -> tuple[int, int]:
        """Return the number of reports and of other frames that are not on storage."""
        with self._lock:
            reports = [report_frame(line) for lines in self._metrics.unwritten().values() for line in lines]
            return sum(frame.data["count"] for frame in reports), sum(map(len, self._events.unwritten().values()))

    def frames_from(self, seq: int, before: int) -> Iterator[Frame]:
        """Yield the report frames numbered ``seq`` to ``before - 1``, from storage. Blocks.

        What cannot be written, because the disk is full, comes from memory: a slow reader loses nothing by that.
        """
        unwritten: dict[str, list[bytes]] = {}
        try:
            self.flush()
        except OSError:
            with self._lock:  # a flush moves lines
                unwritten = self._metrics.unwritten()
        segments = list(self._metrics.segments)  # the event loop adds to it meanwhile
        for index, (first, name) in enumerate(segments):
            is_last = index + 1 == len(segments)
            if first >= before or (not is_last and segments[index + 1][0] <= seq):
                continue
            data = b"" if unwritten.get(name) and not self._storage.exists(name) else self._storage.read_bytes(name)
            # A flush may be writing the last line of the file, or may have written those in memory by now.
            for line in [*_whole_lines(data), *unwritten.get(name, [])]:
                frame = report_frame(line)
                if seq <= frame.seq < before:
                    seq = frame.seq + 1
                    yield frame


def report_frame(line: bytes) -> Frame:
    """Return the frame of a line of a metrics file; its rows are not parsed."""
    head, _, rows = line.partition(b',"rows":')
    fields = json.loads(head + b"}")
    data = {name: fields[name] for name in ("first", "count", "closes") if name in fields}
    return Frame(fields["seq"], frames.REPORTS, fields["attempt"], fields["rank"], data, rows.rstrip()[:-1])


def event_frame(line: bytes) -> Frame:
    """Return the frame of a line of an events file."""
    fields = decode(line)
    put_nonfinite(fields, fields.pop("nonfinite", []))
    if "timestamp" not in fields:  # only events have it; some kinds of events and of other frames have the same name
        return Frame(fields["seq"], fields["kind"], fields["attempt"], fields.get("rank", -1), fields["data"])
    data = {key: fields[key] for key in ("kind", "timestamp", "data")}
    return Frame(fields["seq"], frames.EVENT, fields["attempt"], data=data)


def stored_frames(storage: Storage) -> list[Frame]:
    """Return all frames in a run's folder, in their order.

    Raises:
        CheckpointNotFoundError: The folder is not a run's folder.
        CheckpointCorruptError: A file is damaged.
    """
    found = [
        parse_line(line, to_frame, storage.path_of(name))
        for names, to_frame in journal_files(storage)
        for name in names
        for line in _whole_lines(storage.read_bytes(name))
    ]
    return sorted(found, key=lambda frame: frame.seq)


def journal_files(storage: Storage) -> list[tuple[list[str], Callable[[bytes], Frame]]]:
    """Return the names of a run's events files and of its metrics files, oldest first, each with the parser of its lines.

    Raises:
        CheckpointNotFoundError: The folder is not a run's folder.
    """
    names = storage.list_names()
    events = list(filter(_EVENTS_FILE.fullmatch, names))
    if not events:
        raise CheckpointNotFoundError(
            f"{storage.path_of('')} is not a run's folder: it has no events.jsonl{suggest_run(storage)}"
        )
    return [(events, event_frame), (list(filter(_METRICS_FILE.fullmatch, names)), report_frame)]


def parse_line(line: bytes, to_frame: Callable[[bytes], Frame], where: str) -> Frame:
    """Return the frame of a line of a file.

    Args:
        line: The line.
        to_frame: `event_frame` or `report_frame`.
        where: The file's path, for the message.

    Raises:
        CheckpointCorruptError: The line is damaged.
    """
    try:
        return to_frame(line)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        start = line[:_MAX_QUOTED].decode("utf-8", "replace")
        raise CheckpointCorruptError(
            f"{where} is damaged: raysgd did not write the line {start!r}; remove that line, or copy the file again."
        ) from error


@contextlib.contextmanager
def reading(storage: Storage) -> Iterator[None]:
    """Turn errors in the block that values in a run's files cause into one that names the folder.

    Raises:
        CheckpointCorruptError: Something in the files is not as raysgd writes it.
    """
    try:
        yield
    except RaySGDError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"the files of the run {storage.path_of('')} are damaged ({type(error).__name__}: {error}); copy them again."
        ) from error


def read_description(storage: Storage) -> dict[str, Any]:
    """Return the content of a run's ``run.json``; empty if there is none yet.

    Raises:
        CheckpointCorruptError: It is damaged.
    """
    if not storage.exists("run.json"):
        return {}
    where = storage.path_of("run.json")
    try:
        found = json.loads(storage.read_bytes("run.json"))
    except ValueError as error:
        raise CheckpointCorruptError(f"{where} is damaged: it is not JSON ({error}); copy the file again.") from error
    if not isinstance(found, dict):
        raise CheckpointCorruptError(f"{where} is damaged: it is not a JSON object; copy the file again.")
    return found


def last_reports(storage: Storage) -> Iterator[Frame]:
    """Yield the frames of the newest reports in a run's folder, newest first: those in its last two files."""
    for name in sorted(filter(_METRICS_FILE.fullmatch, storage.list_names()))[-2:][::-1]:
        for line in _lines_from_end(storage, name):
            yield parse_line(line, report_frame, storage.path_of(name))


def first_event(storage: Storage) -> dict[str, Any]:
    """Return the data of the first event of a run, ``run_start``; empty if it is not written yet."""
    for name in sorted(filter(_EVENTS_FILE.fullmatch, storage.list_names())):
        line, is_whole, _ = storage.read_with(name, functools.partial(_read_range, 0, _BLOCK_BYTES)).partition(b"\n")
        if is_whole:
            return dict(parse_line(line, event_frame, storage.path_of(name)).data["data"])
    return {}


def is_live(storage: Storage) -> bool:
    """Return whether a run has no end in its journal, and is paused or has written to it in the last `SILENT_S`.

    Raises:
        CheckpointCorruptError: The journal is damaged.
    """
    is_recent: bool | None = None
    for name in sorted(filter(_EVENTS_FILE.fullmatch, storage.list_names()), reverse=True):
        for line in _lines_from_end(storage, name):
            frame = parse_line(line, event_frame, storage.path_of(name))
            kind = frame.data["kind"] if frame.kind == frames.EVENT else frame.kind
            if kind == frames.RUN_END:
                return False
            if kind == "paused":
                return True
            if frame.kind == frames.EVENT and is_recent is None:
                is_recent = time.time() - frame.data["timestamp"] < SILENT_S
            if kind in ("sample", "resumed"):
                return bool(is_recent)
    return bool(is_recent)


def _lines_from_end(storage: Storage, name: str) -> Iterator[bytes]:
    """Yield the complete lines of a file, the last one first. It is read in blocks, as far as lines are asked for."""
    end = storage.size(name)
    begun, is_torn = b"", True  # the end of a line that begins in an earlier block; whether it has no end
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        block = storage.read_with(name, functools.partial(_read_range, begin, end))
        begun, *lines = (block + begun).split(b"\n")
        if lines and is_torn:  # a crash may have cut off the last line
            lines.pop()
            is_torn = False
        yield from filter(None, reversed(lines))
        end = begin
    if begun and not is_torn:
        yield begun


def _read_range(begin: int, end: int, file: BinaryIO) -> bytes:
    file.seek(begin)
    return bytes(file.read(end - begin))


def suggest_run(folder: Storage) -> str:
    """Return the end of a sentence about a folder that is not a run's: the runs in it, if it is a Trainer's folder."""
    runs = run_names(folder)
    if not runs:
        return "." if folder.exists() else ", and does not exist."
    shown = ", ".join(runs if len(runs) <= _MAX_NAMED else [*runs[:2], "...", *runs[-2:]])
    return f". It is a Trainer's folder, with {shown}; did you mean {folder.path_of(runs[-1])}?"


def _last_seq(data: bytes, first: int) -> int:
    """Return the number of the last complete line; ``first`` if there is none."""
    lines = _whole_lines(data)
    match = _SEQ.match(lines[-1]) if lines else None
    return first if match is None else int(match[1])


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next line does not continue it."""
    with open(path, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _whole_lines(data: bytes) -> list[bytes]:
    """Return the complete lines: a crash may have cut off the last one."""
    lines = data.split(b"\n")
    return [line for line in lines[:-1] if line]


def _event_line(frame: Frame, secrets: Set[str]) -> bytes:
    if frame.kind == frames.EVENT:
        fields = {"seq": frame.seq, "attempt": frame.attempt, **frame.data}
    else:
        data = {key: value for key, value in frame.data.items() if not isinstance(value, bytes)}
        fields = {"seq": frame.seq, "attempt": frame.attempt, "kind": frame.kind, "rank": frame.rank, "data": data}
    fields = redact_texts(fields, secrets, untouched=("kind",))
    try:
        return _strict_line(fields)
    except ValueError:  # as a rule all numbers are finite, and looking at each takes twice as long as writing them
        fields, nonfinite = take_nonfinite(fields)
        return _strict_line({**fields, "nonfinite": nonfinite})


def _strict_line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), default=str, allow_nan=False).encode() + b"\n"
