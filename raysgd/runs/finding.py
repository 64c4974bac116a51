"""How runs are found: one walk below a folder, which the command, the page and the readers of one run share."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raysgd.checkpoint.links import run_names
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import ConfigError, RaySGDError

#: How deep below a storage path a run may be: a Trainer's folder has runs, that of a search the folders of its trials.
MAX_DEPTH = 3
#: A folder with one of these files is that of a run. A run that has only begun has no other.
FILE_OF_RUN = re.compile(r"run\.json|events(-\d+)?\.jsonl")


def is_run(folder: Storage) -> bool:
    """Return whether a folder is that of a run."""
    return any(map(FILE_OF_RUN.fullmatch, folder.list_names()))


def find_runs(folder: Storage, problems: list[str] | None = None) -> Iterator[Storage]:
    """Yield the folders of runs: the folder itself, or those below it, by name. Symbolic links and hidden folders are skipped.

    Args:
        folder: The folder of a run or of a Trainer, or a storage path; it need not exist.
        problems: Gets a line for each folder that cannot be read; the others are found nevertheless.
    """
    yield from _walk(folder, MAX_DEPTH, [] if problems is None else problems)


def _walk(folder: Storage, depth: int, problems: list[str]) -> Iterator[Storage]:
    try:
        if is_run(folder):
            yield folder
            return
        below = folder.list_folders() if depth else []
    except RaySGDError as error:
        problems.append(f"{folder.path_of('')} cannot be read: {error}")
        return
    for child in below:
        if not child.name.startswith("."):
            yield from _walk(child, depth - 1, problems)


def newest_run(folder: Storage) -> Storage | None:
    """Return the folder itself if it is a run's, or the newest run in a Trainer's folder, or None."""
    if not folder.is_folder(""):
        return None
    if is_run(folder):
        return folder
    runs = (folder.child(name) for name in reversed(run_names(folder)))
    return next((run for run in runs if run.is_folder("") and is_run(run)), None)


def find_by_name(storage_path: Storage, name: str) -> Storage | None:
    """Return the run that is called so in a storage path, or the newest one of the Trainer that is; None without one.

    Args:
        storage_path: The folder of all runs.
        name: A path in it, such as ``exp`` or ``exp/run_002``; or what `run_name` returns, at any depth.
    """
    try:
        if (found := newest_run(storage_path.below(name))) is not None:
            return found
    except ConfigError:  # such as two dots, which no folder is called
        return None
    for run in find_runs(storage_path):
        if run_name(run) == name:
            return run
        if run.parent().name == name:
            return newest_run(run.parent())
    return None


def run_name(run: Storage) -> str:
    """Return a run's name for people: the names of the folder that it is in, and of its own."""
    return f"{run.parent().name}/{run.name}".lstrip("/")
