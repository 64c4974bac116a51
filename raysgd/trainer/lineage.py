"""The checkpoints of earlier runs that a resumed training belongs to. Driver side."""

from __future__ import annotations

import re
from typing import Any

from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller.journal.journal import read_description
from raysgd.errors import CheckpointError

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
    storage, seen = Storage.from_uri(run_dir), {run_dir}
    description = _describe(storage)
    while isinstance(uri := description.get(RESUMED_FROM), str):
        checkpoint = Storage.from_uri(uri)
        store, number = CheckpointStore(checkpoint.parent()), _NUMBER.fullmatch(checkpoint.name)
        run = store.storage.parent()
        earlier = _describe(run)
        is_same = run.parent().uri == storage.parent().uri or earlier.get("train_func") == description.get("train_func")
        if number is None or not earlier or run.uri in seen or not is_same:
            break
        seen.add(run.uri)
        listed = [each for each in store.list() if each.number <= int(number[1])]
        found = [Checkpoint.of_manifest(store.path(each.number), each) for each in listed] + found
        storage, description = run, earlier
    return found


def _describe(run: Storage) -> dict[str, Any]:
    try:
        return read_description(run)
    except (CheckpointError, OSError):  # damaged, or not reachable any more
        return {}
