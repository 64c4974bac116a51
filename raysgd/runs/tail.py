"""Reads the journal of a run while it is written: each read returns the frames that are new. Runs anywhere, without Ray."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import journal_files, parse_line

#: Seconds to wait for a frame that is not in the files although a later one is: its file is written a moment later.
_GAP_S = 5.0
#: How the line of a sample of a worker's load begins.
_SAMPLE = re.compile(rb'\{"seq":\d+,"attempt":\d+,"kind":"sample",')


class JournalTail:
    """The frames of a run's folder, in their order, each once. Used by one thread at a time.

    Args:
        storage: The run's folder.
        clock: Returns seconds that only grow.
        reports: Whether to read reports.
        samples: Whether to read samples, which most events are; else at most the last one of each read.

    Attributes:
        last_seq: The number of the last frame that was returned; -1 before the first.
        is_behind: The files have more than the last call was allowed to read.
        is_closed: The last frame of the run was returned.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Callable[[], float] = time.monotonic,
        *,
        reports: bool = True,
        samples: bool = True,
    ) -> None:
        self.last_seq = -1
        self.is_behind = False
        self.is_closed = False
        self._storage = storage
        self._clock = clock
        self._has_reports, self._has_samples = reports, samples
        self._offsets: dict[str, int] = {}
        self._complete: set[str] = set()
        self._waiting: list[Frame] = []
        self._gap_since: float | None = None

    def read(self, *, max_bytes: int | None = None, is_final: bool = False) -> list[Frame]:
        """Return the frames that were written since the last call. Blocks.

        Args:
            max_bytes: How much of the files of reports to read, but for the last line; without reports, of those of events.
                None: all.
            is_final: Also return frames after a gap at once: the missing ones are not awaited.

        Raises:
            CheckpointNotFoundError: The folder is not a run's folder.
            CheckpointCorruptError: A file is damaged.
        """
        events, reports = journal_files(self._storage)
        self._read_files(*events, max_bytes=None if self._has_reports else max_bytes)
        if self._has_reports:
            self._read_files(*reports, max_bytes=max_bytes)
        self._waiting.sort(key=lambda frame: frame.seq)
        return list(self._take((is_final and not self.is_behind) or not self._has_reports))

    def _read_files(
        self, names: list[str], to_frame: Callable[[bytes], Frame], *, max_bytes: int | None = None
    ) -> None:
        left = max_bytes
        for name in names:
            if name in self._complete:
                continue
            where = self._storage.path_of(name)
            offset = self._offsets.get(name, 0)
            data = self._storage.read_with(name, functools.partial(_read_lines, offset, left))
            end = data.rfind(b"\n") + 1  # the last line may be half written
            self._offsets[name] = offset + end
            lines = [line for line in data[:end].split(b"\n") if line]
            if not self._has_samples:
                lines = [line for line in lines[:-1] if not _SAMPLE.match(line)] + lines[-1:]
            self._waiting += [parse_line(line, to_frame, where) for line in lines]
            left = None if left is None else left - len(data)
            if left is not None and left <= 0:
                self.is_behind = end > 0  # otherwise a line is half written
                return
            self.is_behind = False
            if name != names[-1]:  # only the last file of a kind grows
                self._complete.add(name)

    def _take(self, is_final: bool) -> Iterator[Frame]:
        """Yield the frames that follow one another; after a gap, those that have waited long enough."""
        num_taken = 0
        for frame in self._waiting:
            if frame.seq > self.last_seq + 1 and not (is_final or self._may_skip_to(frame)):
                break
            self._gap_since = None
            num_taken += 1
            if frame.seq > self.last_seq:
                self.last_seq = frame.seq
                self.is_closed = self.is_closed or frame.kind == frames.RUN_CLOSED
                yield frame
        self._waiting = self._waiting[num_taken:]

    def _may_skip_to(self, frame: Frame) -> bool:
        if self.is_behind:
            return False
        if frame.kind == frames.EVENT and frame.data["kind"] == "controller_restart":  # its numbers begin later
            return True
        now = self._clock()
        self._gap_since = now if self._gap_since is None else self._gap_since
        return now - self._gap_since >= _GAP_S


def _read_lines(offset: int, max_bytes: int | None, file: BinaryIO) -> bytes:
    """Return what is in a file from an offset on: all of it, or so much, and the rest of the line."""
    file.seek(offset)
    if max_bytes is None:
        return bytes(file.read())
    data = bytes(file.read(max_bytes))
    while len(data) >= max_bytes and b"\n" not in data and (more := file.read(max_bytes)):
        data += more
    return data
