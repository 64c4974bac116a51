"""Reads all of a run's folder at once: its journal, its description and its checkpoints. Runs anywhere, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller import frames
from raysgd.controller.checkpoints.pending import find_rounds
from raysgd.controller.journal.journal import read_description, reading, stored_frames
from raysgd.controller.rounds import check_reduce, merge_results
from raysgd.goodput.kept_events import KeptEvents
from raysgd.result import Event, Result
from raysgd.runs.tail import JournalTail

#: How much of the samples of a thousand ranks, gigabytes in an hour, is in memory at once.
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class StoredRun:
    """The contents of a run's files.

    Attributes:
        folder: The run's folder.
        description: The content of ``run.json``.
        events: Its events, oldest first.
        outcome: The kind of its end; None: it is live, or was lost.
        results: What a loop over its results saw. Of an iteration that was repeated after a failure, the latest; without
            those that a failure undid and that were not repeated before the run was done.
        checkpoints: The committed checkpoints, oldest first.
    """

    folder: Storage
    description: dict[str, Any]
    events: list[Event]
    outcome: str | None
    results: list[Result]
    checkpoints: list[Checkpoint]


def read_run(folder: Storage, reduce: Mapping[str, str] | None = None) -> StoredRun:
    """Read the files of a run.

    Args:
        folder: The run's folder.
        reduce: Metrics to compute over all ranks. None: as the run itself did.

    Raises:
        CheckpointNotFoundError: The folder is not that of a run; the text names the runs in it.
        CheckpointCorruptError: A file of the run is damaged.
        ConfigError: ``reduce`` cannot work.
    """
    with reading(folder):
        sequence = stored_frames(folder)
        description = read_description(folder)
        events = [Event(**frame.data) for frame in sequence if frame.kind == frames.EVENT]
        outcome = outcome_of(events)
        reductions = check_reduce(description.get("reduce") if reduce is None else reduce)
        results = merge_results(sequence, reductions, is_done=outcome == "done")
        store = CheckpointStore(folder.child("checkpoints"))
        manifests = find_rounds(store.list(), sequence, reductions) if folder.is_folder("checkpoints") else []
        checkpoints = [Checkpoint.of_manifest(store.path(each.number), each) for each in manifests]
        return StoredRun(folder, description, events, outcome, results, checkpoints)


def read_events(folder: Storage) -> list[Event]:
    """Read the events of a run so far, with those samples that `KeptEvents` keeps, oldest first. Errors as for `read_run`."""
    tail, kept = JournalTail(folder, reports=False), KeptEvents()
    with reading(folder):
        while True:
            for frame in tail.read(max_bytes=_PIECE_BYTES):
                if frame.kind == frames.EVENT:
                    kept.add(Event(**frame.data))
            if not tail.is_behind:
                return list(kept)


def outcome_of(events: Sequence[Event]) -> str | None:
    """Return the kind of a run's end; None: its events have none."""
    return next((event.data["kind"] for event in reversed(events) if event.kind == "run_end"), None)
