"""The checkpoints and results of earlier runs that a resumed training belongs to. Driver, and the callbacks' process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller.journal.journal import read_description, stored_frames
from raysgd.controller.rounds import merge_results
from raysgd.errors import CheckpointError
from raysgd.result import Result

#: The key of ``run.json`` with the checkpoint that a run was started from.
RESUMED_FROM = "resumed_from"
_NUMBER = re.compile(r"checkpoint_([0-9]{6,18})")


def earlier_checkpoints(run_dir: str) -> list[Checkpoint]:
    """Return the checkpoints of the runs that a run was resumed from, oldest first.

    Of each run they are the ones up to the checkpoint from which the next run was resumed: what was trained after it does not
    belong to the training. A run in another Trainer's folder belongs to it if it has the same train_func; else its model was
    trained for something else before, and its metrics are not comparable. A folder that is gone ends the search.
    """
    found: list[Checkpoint] = []
    storage = Storage.from_uri(run_dir)
    for store, manifests in _earlier_runs(storage, _describe(storage)):
        found = [Checkpoint.of_manifest(store.path(each.number), each) for each in manifests] + found
    return found


def earlier_results(run_dir: str, description: Mapping[str, Any], reduce: Mapping[str, str]) -> list[Result]:
    """Return the results of the runs that a run was resumed from, up to their checkpoints, oldest first.

    Args:
        run_dir: The run's folder, which may be empty so far.
        description: ``resumed_from`` and ``train_func`` of the run.
        reduce: As in ``Trainer.run``.
    """
    found: list[Result] = []
    for store, manifests in _earlier_runs(Storage.from_uri(run_dir), description):
        last = max((each.iteration for each in manifests), default=0)
        results = merge_results(stored_frames(store.storage.parent()), reduce, is_done=False)
        found = [each for each in results if each["training_iteration"] <= last] + found
    return found


def _earlier_runs(storage: Storage, description: Mapping[str, Any]) -> Iterator[tuple[CheckpointStore, list[Manifest]]]:
    """Yield the checkpoints of earlier runs that belong to the training, newest run first."""
    seen = {storage.uri}
    while isinstance(uri := description.get(RESUMED_FROM), str):
        checkpoint = Storage.from_uri(uri)
        store, number = CheckpointStore(checkpoint.parent()), _NUMBER.fullmatch(checkpoint.name)
        run = store.storage.parent()
        earlier = _describe(run)
        is_same = run.parent().uri == storage.parent().uri or earlier.get("train_func") == description.get("train_func")
        if number is None or not earlier or run.uri in seen or not is_same:
            break
        seen.add(run.uri)
        yield store, [each for each in store.list() if each.number <= int(number[1])]
        storage, description = run, earlier


def _describe(run: Storage) -> dict[str, Any]:
    try:
        return read_description(run)
    except (CheckpointError, OSError):  # damaged, or not reachable any more
        return {}
