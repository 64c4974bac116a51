"""Finds the runs in a folder, and says what each is, from the begin and the end of its files. Runs anywhere, without Ray."""

from __future__ import annotations

import threading
import time
from typing import Any, BinaryIO

from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.journal.journal import event_frame, journal_files
from raysgd.errors import CheckpointNotFoundError, RaySGDError
from raysgd.viewer.run_data import SILENT_S, RunData, run_label

#: How deep below the folder a run may be: a Trainer's folder has runs, a storage path has Trainers' folders.
_MAX_DEPTH = 3
#: Bytes at the end of a journal that have the last event and, if the run has ended, its end.
_TAIL_BYTES = 64 << 10
#: Runs whose contents are kept in memory.
_MAX_OPEN = 32
#: A search for runs that takes longer than this is not repeated at once.
_SLOW_S = 0.1
_ENDED = frozenset({"done", "stopped", "cancelled", "error"})
#: The states that change seldom, and after how many seconds they are read again.
_RARE = frozenset({"silent", "unreadable"})
_RARE_S = 15.0


class Catalog:
    """The runs below a folder, by numbers that stay. Thread-safe.

    Args:
        folder: A storage path, a Trainer's folder or a run's folder.
    """

    def __init__(self, folder: Storage) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._scan_lock = threading.Lock()
        self._scan_again_at = 0.0
        self._numbers: dict[str, int] = {}
        self._storages: list[Storage] = []
        self._present: list[int] = []
        self._described: dict[int, tuple[float, dict[str, Any]]] = {}
        self._open: dict[int, RunData] = {}

    def list_runs(self) -> list[dict[str, Any]]:
        """Return ``id``, ``name``, ``state``, ``started`` and ``updated`` of each run, the newest first. Blocks."""
        with self._scan_lock:
            self._scan_if_due()
            listed = [self._describe(number) for number in self._present]
        found = [run for run in listed if run is not None]
        return sorted(found, key=lambda run: (run["started"], run["id"]), reverse=True)

    def open_run(self, number: int) -> RunData:
        """Return a run of the list.

        Raises:
            CheckpointNotFoundError: The list has no run of this number.
        """
        with self._lock:
            if not 0 <= number < len(self._storages):
                raise CheckpointNotFoundError(f"there is no run {number} in the list; load the page again.")
            run = self._open.pop(number, None) or RunData(self._storages[number])
            self._open[number] = run  # the last one in the order of use
            while len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
            return run

    def close_run(self, number: int) -> None:
        """Forget the contents of a run; `open_run` reads them again."""
        with self._lock:
            self._open.pop(number, None)

    def _scan_if_due(self) -> None:
        """Look for runs, at most a tenth of the time where that takes long, as on object stores with many folders."""
        began = time.monotonic()
        if began < self._scan_again_at:
            return
        found = _find_runs(self.folder, _MAX_DEPTH)
        for storage in found:
            if storage.uri not in self._numbers:
                with self._lock:
                    self._numbers[storage.uri] = len(self._storages)
                    self._storages.append(storage)
        self._present = [self._numbers[storage.uri] for storage in found]
        ended = time.monotonic()
        took_s = ended - began
        self._scan_again_at = ended + (9 * took_s if took_s > _SLOW_S else 0.0)

    def _describe(self, number: int) -> dict[str, Any] | None:
        if number in self._described:
            read_at, known = self._described[number]
            if known["state"] in _ENDED or (known["state"] in _RARE and time.monotonic() - read_at < _RARE_S):
                return known
        storage = self._storages[number]
        found: dict[str, Any] = {"id": number, "name": run_label(storage)}
        try:
            found |= _read_state(storage)
        except CheckpointNotFoundError:  # it was deleted
            return None
        except (RaySGDError, OSError, ValueError, LookupError, TypeError):
            found |= {"state": "unreadable", "started": 0.0, "updated": 0.0}
        self._described[number] = time.monotonic(), found
        return found


def _find_runs(folder: Storage, depth: int) -> list[Storage]:
    """Return the runs below a folder. Folders that cannot be read are skipped."""
    try:
        names = folder.list_names()
        if any(name.startswith("events") and name.endswith(".jsonl") for name in names):
            return [folder]
        below = [folder.child(name) for name in names if not name.startswith(".") and folder.is_folder(name)]
    except RaySGDError:
        return []
    return [run for child in below for run in _find_runs(child, depth - 1)] if depth else []


def _read_state(storage: Storage) -> dict[str, Any]:
    """Return a run's state, its start and its last event, from the begin and the end of its journal."""
    (names, _), _ = journal_files(storage)
    first = _lines(storage, names[0], is_end=False)[:1]
    started = event_frame(first[0]).data.get("timestamp", 0.0) if first else 0.0
    state, updated = "", started
    for line in reversed(_lines(storage, names[-1], is_end=True)):
        frame = event_frame(line)
        if frame.kind == frames.RUN_END:
            state = state or str(frame.data.get("kind", "done"))
        elif frame.kind == frames.EVENT:
            if frame.data["kind"] in ("paused", "resumed") and not state:
                state = "paused" if frame.data["kind"] == "paused" else "live"
            updated = max(updated, frame.data["timestamp"])
    if state in ("", "live"):
        state = "live" if time.time() - updated < SILENT_S else "silent"
    return {"state": state, "started": started, "updated": updated}


def _lines(storage: Storage, name: str, *, is_end: bool) -> list[bytes]:
    """Return whole lines of the begin or the end of a file."""

    def read(file: BinaryIO) -> bytes:
        if not is_end:
            return bytes(file.read(_TAIL_BYTES))
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        data = bytes(file.read())
        return data if size <= _TAIL_BYTES else data.partition(b"\n")[2]

    data = storage.read_with(name, read)
    return [line for line in data[: data.rfind(b"\n") + 1].split(b"\n") if line]
