"""The list of the runs in a folder, as the page shows it. Runs anywhere, without Ray."""

from __future__ import annotations

import itertools
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointNotFoundError, RaySGDError
from raysgd.result import ENDED
from raysgd.runs.annotations import read_annotations
from raysgd.runs.finding import find_runs, run_name
from raysgd.runs.state import StateReader
from raysgd.viewer.event_files import EventFilesRun, find_event_files
from raysgd.viewer.rows import row_of
from raysgd.viewer.run_data import RunData

#: Runs whose contents are kept in memory.
_MAX_OPEN = 32
#: A search for runs that takes longer than this is not repeated at once.
_SLOW_S = 0.1
#: Seconds that one request for rows spends on reading all reports of runs; the next one continues.
_BUDGET_S = 0.5
#: After how many seconds a run is read again whose state changes seldom.
_AGAIN_S = {**dict.fromkeys(ENDED, math.inf), "silent": 15.0, "unreadable": 15.0}


@dataclass
class _Listed:
    """A run of the list, and what was last read of it."""

    number: int
    folder: Storage
    states: StateReader
    event_files: EventFilesRun | None = None
    again_at: float = 0.0
    shown: dict[str, Any] | None = None


class Catalog:
    """The runs below a folder, by numbers that stay. Thread-safe.

    Args:
        folder: A storage path, a Trainer's folder or a run's folder.
        event_files: A folder whose event files of TensorBoard are shown as runs, too.
    """

    def __init__(self, folder: Storage, event_files: Storage | None = None) -> None:
        self.folder = folder
        self._event_files = event_files
        self._lock = threading.Lock()
        self._scan_lock = threading.Lock()
        self._scan_again_at = 0.0
        self._numbers = itertools.count()
        self._runs: dict[str, _Listed] = {}
        self._present: list[_Listed] = []
        self._open: dict[int, RunData] = {}

    def list_runs(self) -> list[dict[str, Any]]:
        """Return what the list shows of each run, newest first. Blocks.

        Returns:
            ``id``, ``name``, ``state``, ``iteration``, ``started``, ``updated``, and, if it can be read, what `row_of` returns.
        """
        with self._scan_lock:
            self._scan_if_due()
            found = [shown for run in self._present if (shown := _describe(run)) is not None]
        return sorted(found, key=lambda run: (run["started"], run["id"]), reverse=True)

    def open_run(self, number: int) -> RunData:
        """Return a run of the list.

        Raises:
            CheckpointNotFoundError: The list has no run of this number.
        """
        folder = self.folder_of(number)
        with self._lock:
            run = self._open.pop(number, None) or self._runs[folder.uri].event_files or RunData(folder)
            self._open[number] = run  # the last one in the order of use
            while len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
            return run

    def folder_of(self, number: int) -> Storage:
        """Return the folder of a run of the list. Errors as for `open_run`."""
        with self._lock:
            folder = next((run.folder for run in self._runs.values() if run.number == number), None)
        if folder is None:
            raise CheckpointNotFoundError(f"there is no run {number} in the list; load the page again.")
        return folder

    def close_run(self, number: int) -> None:
        """Forget the contents of a run; `open_run` reads them again."""
        with self._lock:
            self._open.pop(number, None)

    def _scan_if_due(self) -> None:
        """Look for runs, at most a tenth of the time where that takes long, as on object stores with many folders."""
        began = time.monotonic()
        if began < self._scan_again_at:
            return
        found = {folder.uri: folder for folder in find_runs(self.folder)}
        names = {} if self._event_files is None else find_event_files(self._event_files)
        found |= {place: Storage.from_uri(place) for place in names if place not in found}
        missing = [uri for uri in self._runs if uri not in found]
        deleted = [uri for uri in missing if not self._runs[uri].folder.exists()]
        with self._lock:
            for uri in deleted:  # a new run may have the same folder
                self._open.pop(self._runs.pop(uri).number, None)
            for uri, folder in found.items():
                if uri not in self._runs:
                    of_events = EventFilesRun(folder, names[uri]) if uri in names else None
                    self._runs[uri] = _Listed(next(self._numbers), folder, StateReader(folder), of_events)
        self._present = [self._runs[uri] for uri in found]
        ended = time.monotonic()
        took_s = ended - began
        self._scan_again_at = ended + (9 * took_s if took_s > _SLOW_S else 0.0)


class RunTable:
    """The rows of the runs in a catalog. Thread-safe.

    Args:
        catalog: The runs.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._version = 0
        self._rows: dict[int, tuple[int, dict[str, Any]]] = {}
        self._ranges: dict[int, tuple[float, dict[str, list[float]]]] = {}

    def read(self, after: int = -1, *, with_ranges: bool = False) -> dict[str, Any]:
        """Return the rows that have changed. Blocks.

        Args:
            after: The ``version`` of an earlier answer. -1: return all.
            with_ranges: Rows also have ``ranges``, the lowest and the highest value of each metric.

        Returns:
            ``version``; ``ids`` of all rows, newest first; ``runs``, the rows that have changed; ``num_unread``, the number of
            rows whose ranges are still to be read.
        """
        with self._lock:
            rows = self._catalog.list_runs()
            ends_at = time.monotonic() + _BUDGET_S
            num_unread = 0
            for row in rows:
                if with_ranges:
                    num_unread += not self._read_ranges(row["id"], row["updated"], ends_at)
                row = {**row, "ranges": self._ranges.get(row["id"], (0.0, {}))[1]}
                if self._rows.get(row["id"], (0, None))[1] != row:
                    self._rows[row["id"]] = self._version + 1, row
            present = {row["id"]: self._rows[row["id"]] for row in rows}
            self._rows = present
            self._version = max([self._version, *(version for version, _ in present.values())])
            return {
                "version": self._version,
                "ids": list(present),
                "runs": [row for version, row in present.values() if version > after],
                "num_unread": num_unread,
            }

    def _read_ranges(self, number: int, updated: float, ends_at: float) -> bool:
        """Read the ranges of a run's metrics, if there is time; return whether they are those of now."""
        if number in self._ranges and self._ranges[number][0] == updated:
            return True
        left_s = ends_at - time.monotonic()
        if left_s < 0:
            return False
        try:
            ranges = self._catalog.open_run(number).ranges(left_s)
        except RaySGDError:  # its row says that it cannot be read
            ranges = {}
        if ranges is None:
            return False
        self._ranges[number] = updated, ranges
        return True


def _describe(run: _Listed) -> dict[str, Any] | None:
    """Return what the list shows of a run; None if it was deleted."""
    name = run_name(run.folder) if run.event_files is None else run.event_files.name
    shown: dict[str, Any] = {"id": run.number, "name": name}
    try:
        if run.shown is not None and time.monotonic() < run.again_at:
            return {**run.shown, **vars(read_annotations(run.folder))} if run.folder.is_local else run.shown
        shown |= row_of(run.states.read() if run.event_files is None else run.event_files.read_state())
    except CheckpointNotFoundError:
        return None
    except (RaySGDError, OSError):
        run.states = StateReader(run.folder)  # the next time it is read from the beginning
        run.event_files = None if run.event_files is None else EventFilesRun(run.folder, name)
        shown |= {"state": "unreadable", "iteration": 0, "started": 0.0, "updated": 0.0}
    run.shown, run.again_at = shown, time.monotonic() + _AGAIN_S.get(shown["state"], 0.0)
    return shown
