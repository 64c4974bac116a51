"""What a run has left on storage, and what it should have. The rules are pure; `read_stored` reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raysgd.checkpoint.checkpoint import load_state
from raysgd.checkpoint.manifest import MANIFEST_NAME, Manifest
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.checkpoint.verify import verify_files
from raysgd.controller import frames
from raysgd.errors import CheckpointError, CheckpointNotFoundError, UnsafeStateError
from raysgd.testing.record import History, Stored, committed


def read_stored(store: CheckpointStore) -> dict[int, Stored]:
    """Each checkpoint's folder: what is in it, and whether it can be loaded. Reads all files."""
    return {number: _read_one(store, number) for number in store.numbers()} if store.storage.exists() else {}


def _read_one(store: CheckpointStore, number: int) -> Stored:
    folder = store.directory(number)
    try:
        manifest = store.read(number)
    except CheckpointNotFoundError:
        return Stored(unlisted=tuple(folder.list_names()))
    except CheckpointError as error:
        return Stored(problem=str(error))
    listed = {entry.name.partition("/")[0] for entries in manifest.parts.values() for entry in entries}
    unlisted = tuple(name for name in folder.list_names() if name not in listed | {MANIFEST_NAME})
    return Stored(manifest, _problem_of(folder, manifest), unlisted)


def _problem_of(folder: Storage, manifest: Manifest) -> str:
    try:
        verify_files(folder, manifest, checksums=True)
        for rank in manifest.parts if not manifest.is_files else ():
            load_state(folder, manifest, rank, trusted=False)
    except UnsafeStateError:  # saved as trusted: its code is not to be run for a check
        return ""
    except CheckpointError as error:
        return str(error)
    return ""


# -- rules -------------------------------------------------------------------------------------------------------------


def what_counts_can_be_loaded(history: History) -> Iterator[str]:
    """A checkpoint that was told of, and not deleted, is there as it was told, complete, and loads."""
    for number, told in sorted(committed(history.frames).items()):
        found = history.stored.get(number)
        if found is None and not history.is_closed and any(other > number for other in history.stored):
            continue  # deleted for a newer one, of which the journal says no more
        if found is None:
            yield f"checkpoint {number} was committed, and is not on storage"
        elif found.problem:
            yield f"checkpoint {number} was committed, and cannot be loaded: {found.problem}"
        elif found.manifest is None:
            yield f"checkpoint {number} was committed, and has no manifest"
        else:
            yield from _differences(number, told, found.manifest, is_closed=history.is_closed)


def _differences(number: int, told: dict[str, Any], manifest: Manifest, *, is_closed: bool) -> Iterator[str]:
    for name in ("iteration", "attempt"):
        # In a loop that saves first the round comes later, and with it another manifest; that may be told of no more.
        is_late = not is_closed and name == "iteration" and manifest.iteration == told[name] + 1
        if told[name] != getattr(manifest, name) and not is_late:
            yield f"checkpoint {number} was told with {name} {told[name]}; its manifest has {getattr(manifest, name)}"
    needed = set(range(manifest.world_size)) if manifest.all_ranks else set()
    with_part = {rank for rank, entries in manifest.parts.items() if entries}
    if missing := sorted(needed - with_part):
        yield f"checkpoint {number} is of {manifest.world_size} ranks, and has no part of ranks {missing}"
    if not with_part:
        yield f"checkpoint {number} holds no state"


def nothing_else_is_there(history: History) -> Iterator[str]:
    """No deleted checkpoint, no half of one, and no file that belongs to none, in the folder of a run that is closed."""
    told = {frame.data["number"] for frame in history.frames if frame.kind == frames.CHECKPOINT}
    kept = committed(history.frames)
    for number, found in sorted(history.stored.items()):
        if number in kept:
            if found.unlisted and history.is_closed:
                yield f"checkpoint {number} has files that are not its own: {', '.join(found.unlisted)}"
        elif not history.is_closed:  # its last words may be lost
            continue
        elif number in told:
            yield f"checkpoint {number} was deleted, and is still there"
        elif found.manifest is not None or found.problem:
            yield f"checkpoint {number} is on storage, and was never told of"
        else:
            yield f"parts of checkpoint {number}, which was never committed, are left: {', '.join(found.unlisted)}"
