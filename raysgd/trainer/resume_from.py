"""Where a training begins: what ``resume_from`` means, at every front door. Driver side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raysgd._util.logs import get_logger
from raysgd._util.text import with_article
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.codecs.frameworks import extract_states
from raysgd.checkpoint.codecs.tree import is_state
from raysgd.checkpoint.links import BEST, LAST, find_best, list_manifests, list_runs
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller.journal.journal import read_description, stored_frames
from raysgd.controller.rounds import check_reduce
from raysgd.controller.run_plan import Start
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ConfigError
from raysgd.runs.finding import is_run


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint that a training continues from.

    Attributes:
        checkpoint: None: there is none, and the training begins.
        skipped: A line for each checkpoint that would have been taken and is damaged.
    """

    checkpoint: Checkpoint | None = None
    skipped: tuple[str, ...] = ()


def resolve_start(
    resume_from: Any, folder: str | None = None, best_by: RetentionPolicy | None = None
) -> tuple[Start, Any]:
    """Resolve ``run(resume_from=...)`` to a checkpoint on storage to start from, and a state to start with.

    In a state, models, optimizers and the like are replaced by their ``state_dict()``, so that train_func loads what
    `raysgd.save_checkpoint` would have saved.

    Args:
        resume_from: A state, or as for `find_checkpoint`.
        folder: As for `find_checkpoint`.
        best_by: As for `find_checkpoint`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointCorruptError: The manifest of the checkpoint is not valid.
        CheckpointError: The checkpoint lives in memory only.
        ConfigError: The value is none of these.
    """
    if not isinstance(resume_from, (type(None), str, os.PathLike, Checkpoint, FoundCheckpoint)):
        if not isinstance(resume_from, Mapping) and not is_state(resume_from):
            raise ConfigError(
                f"run(resume_from=...) got {with_article(type(resume_from).__name__)}; "
                "give a Checkpoint, a path, 'last', 'best', or a state as save_checkpoint takes it."
            )
        return Start(), extract_states(resume_from)
    found = find_checkpoint(resume_from, folder, best_by)
    if found.checkpoint is None:
        return Start(skipped=found.skipped), None
    checkpoint = found.checkpoint
    if checkpoint.path is None:
        raise CheckpointError(
            "run(resume_from=...) got a Checkpoint that lives in memory only and has no path; "
            "give a checkpoint on storage, or a state."
        )
    if isinstance(resume_from, Checkpoint):  # it may be gone by now
        checkpoint = Checkpoint.from_path(checkpoint.path)
    return Start(checkpoint.path, checkpoint.iteration, checkpoint.time_total_s, skipped=found.skipped), None


def find_checkpoint(
    resume_from: str | os.PathLike[str] | Checkpoint | FoundCheckpoint | None,
    folder: str | None = None,
    best_by: RetentionPolicy | None = None,
) -> FoundCheckpoint:
    """Find the checkpoint that ``resume_from`` means.

    A checkpoint that is named is taken, or its error raised. Where the newest or the best of several is asked for, damaged
    ones are skipped.

    Args:
        resume_from: A checkpoint; its path; the folder of a run, or of the runs of a Trainer, of which the newest is meant;
            ``"last"`` or ``"best"``, of the runs in ``folder``, which may have none.
        folder: The folder of the Trainer's runs, path or URI; None: it has none that is known.
        best_by: Says which checkpoint is best.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointCorruptError: A file of the checkpoint is missing or wrong; or of each of those that were looked for.
        ConfigError: There is no folder to look in, or nothing says which checkpoint is best.
    """
    if resume_from is None:
        return FoundCheckpoint()
    if isinstance(resume_from, FoundCheckpoint):
        return resume_from
    if isinstance(resume_from, Checkpoint):
        return FoundCheckpoint(resume_from)
    if resume_from not in (LAST, BEST):
        return _find_at(resume_from)
    if folder is None:
        raise ConfigError(
            f"resume_from={resume_from!r} looks in the folder of the Trainer's runs, which is a new one: give "
            "RunConfig(name=...), or the path of a run."
        )
    runs = Storage.from_uri(folder)
    if resume_from == BEST and best_by is None:
        raise ConfigError(
            "resume_from='best' needs to know which checkpoint is best: give CheckpointConfig(score_attribute=...), or "
            "keep_best."
        )
    found = find_newest(runs) if resume_from == LAST or best_by is None else _find_best(runs, best_by)
    if found.checkpoint is None and found.skipped:  # a training that begins again is seen late
        raise CheckpointCorruptError(
            f"resume_from={resume_from!r}: {folder} has no whole checkpoint; {found.skipped[0]}"
        )
    if found.checkpoint is None:
        get_logger().warning(
            "resume_from=%s: %s has no checkpoint; training starts from the beginning.", resume_from, folder
        )
    return found


def _find_at(path: str | os.PathLike[str]) -> FoundCheckpoint:
    storage = Storage.from_uri(path)
    is_of_run = is_run(storage) or storage.is_folder("checkpoints")
    if not is_of_run and not (storage.is_folder("") and list_runs(storage)):
        return FoundCheckpoint(Checkpoint.from_path(path))
    found = find_newest_of_run(storage) if is_of_run else find_newest(storage)
    if found.checkpoint is None:
        what = "the run in" if is_of_run else "no run in"
        raise CheckpointNotFoundError(f"{what} {path} has {'no' if is_of_run else 'a'} checkpoint.")
    return found


def find_newest(runs: Storage) -> FoundCheckpoint:
    """Find the newest checkpoint of a Trainer's runs that is whole; this reads its files. Errors as for `find_newest_of_run`."""
    skipped: list[str] = []
    for run in reversed(list_runs(runs)):
        found = find_newest_of_run(run)
        skipped += (f"{run.name}: {each}" for each in found.skipped)
        if found.checkpoint is not None:
            return replace(found, skipped=tuple(skipped))
    return FoundCheckpoint(None, tuple(skipped))


def find_newest_of_run(run: Storage) -> FoundCheckpoint:
    """Find the newest checkpoint of a run that is whole; this reads its files.

    Raises:
        StorageError: No checkpoint is usable, and at least one could not be read.
    """
    store = CheckpointStore(run.child("checkpoints"))
    newest = store.newest()
    skipped = tuple(_describe_skipped(each.number, each.error) for each in newest.skipped)
    manifest = newest.manifest
    if manifest is None:
        return FoundCheckpoint(None, skipped)
    if manifest.awaits_round and run.exists("run.json"):  # it may have ended before it wrote which round that is
        from raysgd.controller.checkpoints.pending import find_rounds  # not for a cold start

        reduce = check_reduce(read_description(run).get("reduce"))
        (manifest,) = find_rounds([manifest], stored_frames(run), reduce)
    return FoundCheckpoint(Checkpoint.of_manifest(store.path(manifest.number), manifest), skipped)


def _find_best(runs: Storage, best_by: RetentionPolicy) -> FoundCheckpoint:
    """Find the best checkpoint of a Trainer's runs whose files have the right sizes; the newest, if none has the metric."""
    skipped: list[str] = []
    found = list_manifests(runs)
    while found:
        best = find_best([manifest.metrics for _, manifest in found], best_by)
        store, manifest = found.pop(-1 if best is None else best)
        try:
            return FoundCheckpoint(Checkpoint.from_path(store.path(manifest.number)), tuple(skipped))
        except CheckpointError as error:
            skipped.append(f"{store.storage.parent().name}: {_describe_skipped(manifest.number, error)}")
    return FoundCheckpoint(None, tuple(skipped))


def _describe_skipped(number: int, error: CheckpointError) -> str:
    return f"checkpoint {number} is damaged and was skipped: {error}"
