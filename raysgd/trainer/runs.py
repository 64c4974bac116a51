"""The files of a run, read back. Anywhere; needs no Ray. No pickle is ever read from a run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal import stored_frames
from raysgd.controller.reducing import check_reduce
from raysgd.controller.rounds import RoundMerger
from raysgd.result import Event, Result


@dataclass(frozen=True)
class LoadedRun:
    """What a run left.

    Attributes:
        run_dir: Its folder.
        metrics: A row per iteration: rank 0's metrics and the automatic keys; of an iteration that was made again after a
            failure, the latest.
        workers: A row per iteration and rank, with each rank's own metrics.
        events: A row per event: ``timestamp``, ``kind``, ``data``.
        samples: A row per look at a worker: CPU, memory, GPU, pace of reports.
        config: The config, secrets redacted.
        description: All of ``run.json``.
        checkpoints: The committed checkpoints, oldest first.
        outcome: ``"done"``, ``"stopped"`` (ended early and in peace), ``"cancelled"``, ``"error"``; None while it runs, or if
            it was lost. Why is in the event ``run_end``.
    """

    run_dir: str
    metrics: pd.DataFrame
    workers: pd.DataFrame
    events: pd.DataFrame
    samples: pd.DataFrame
    config: dict[str, Any]
    description: dict[str, Any]
    checkpoints: list[Checkpoint] = field(default_factory=list)
    outcome: str | None = None


def load_run(run_dir: str | os.PathLike[str], reduce: dict[str, str] | None = None) -> LoadedRun:
    """Read a run's files.

    Args:
        run_dir: The run's folder, path or URI.
        reduce: Metrics to be made of all ranks, as in ``Trainer.run``.

    Raises:
        CheckpointNotFoundError: The folder is no run's.
    """
    storage = Storage.from_uri(run_dir)
    sequence = stored_frames(storage)
    results = _results(sequence, check_reduce(reduce))
    events = [Event(**frame.data) for frame in sequence if frame.kind == frames.EVENT]
    description = json.loads(storage.read_bytes("run.json")) if storage.exists("run.json") else {}
    ends = [event.data["kind"] for event in events if event.kind == "run_end"]
    return LoadedRun(
        run_dir=storage.uri,
        metrics=pd.DataFrame([dict(result) for result in results]),
        workers=pd.DataFrame(list(_worker_rows(results))),
        events=pd.DataFrame(
            [(e.timestamp, e.kind, e.data) for e in events if e.kind != "sample"], columns=["timestamp", "kind", "data"]
        ),
        samples=pd.DataFrame([{"timestamp": e.timestamp, **e.data} for e in events if e.kind == "sample"]),
        config=description.get("config", {}),
        description=description,
        checkpoints=_checkpoints(storage),
        outcome=ends[-1] if ends else None,
    )


def _results(sequence: list[Frame], reduce: dict[str, str]) -> list[Result]:
    merger = RoundMerger(reduce)
    by_iteration: dict[int, Result] = {}
    for frame in sequence:
        for result in merger.feed(frame):
            by_iteration[result["training_iteration"]] = result
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]


def _worker_rows(results: list[Result]) -> Iterator[dict[str, Any]]:
    for result in results:
        for rank, metrics in zip(result.ranks, result.workers, strict=True):
            automatic = {"training_iteration": result["training_iteration"], "attempt": result["attempt"], "rank": rank}
            yield {**automatic, **{k: v for k, v in metrics.items() if k not in automatic}}


def _checkpoints(storage: Storage) -> list[Checkpoint]:
    if not storage.is_folder("checkpoints"):
        return []
    store = CheckpointStore(storage.child("checkpoints"))
    return [Checkpoint.of_manifest(store.path(manifest.number), manifest) for manifest in store.list()]
