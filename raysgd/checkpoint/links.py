"""The names ``last`` and ``best`` in a Trainer's folder, which lead to checkpoints of its runs. Written by the TrainerActor.

On a local disk they are symbolic links; elsewhere files with the path of the checkpoint's folder, which
`raysgd.checkpoint.checkpoint.Checkpoint.from_path` follows. A name is replaced after the checkpoint that it will lead to is
committed, and before older ones are deleted: it leads to a whole checkpoint at any time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, directory_name
from raysgd.config.run import CheckpointConfig
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError

LAST, BEST = "last", "best"
_RUN = re.compile(r"run_\d+", re.ASCII)
_TARGET = re.compile(r"run_\d+/checkpoints/checkpoint_\d{6,18}", re.ASCII)
_MAX_BYTES = 1000


class CheckpointLinks:
    """Keeps ``last`` and ``best`` of all runs in a Trainer's folder.

    Args:
        runs: The Trainer's folder.
        run_name: The folder of this run in it.
        best_by: Says which of two checkpoints is better. None: there is no ``best``.
    """

    def __init__(self, runs: Storage, run_name: str, best_by: RetentionPolicy | None) -> None:
        self._runs = runs
        self._store = CheckpointStore(runs.child(run_name, "checkpoints"))
        self._best_by = best_by
        self._last_number = 0
        self._best: Manifest | None = None

    def repair(self) -> None:
        """Make both lead where they should, after a crash, for a new run, or when one was deleted. Reads all manifests."""
        found = list_manifests(self._runs)
        best = None if self._best_by is None else find_best([each.metrics for _, each in found], self._best_by)
        if found:
            self._link(LAST, *found[-1])
        else:
            self._unlink(LAST)
        if best is not None:
            store, self._best = found[best]
            self._link(BEST, store, self._best)
        elif self._best_by is not None:
            self._best = None
            self._unlink(BEST)

    def update(self, manifest: Manifest) -> None:
        """Make them lead to a checkpoint of this run that was committed, or whose metrics have changed."""
        if manifest.number >= self._last_number:
            self._last_number = manifest.number
            self._link(LAST, self._store, manifest)
        if self._best_by is None:
            return
        candidates = [manifest] if self._best is None else [self._best, manifest]
        best = find_best([each.metrics for each in candidates], self._best_by)
        if best is not None and candidates[best] is manifest:
            self._best = manifest
            self._link(BEST, self._store, manifest)

    def _unlink(self, link: str) -> None:
        if not self._runs.is_local:
            self._runs.delete_file(link)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._runs.path_of(link))

    def _link(self, link: str, store: CheckpointStore, manifest: Manifest) -> None:
        target = place_of(store, manifest.number)
        if not self._runs.is_local:
            self._runs.write_bytes(link, target.encode())
            return
        path = self._runs.path_of(link)
        if os.path.islink(path) and os.readlink(path) == target:
            return
        temporary = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed here
            os.unlink(temporary)
        os.symlink(target, temporary)
        os.replace(temporary, path)


def place_of(store: CheckpointStore, number: int) -> str:
    """Return the path of a checkpoint in the Trainer's folder."""
    return f"{store.storage.parent().name}/{store.storage.name}/{directory_name(number)}"


def list_runs(runs: Storage) -> list[Storage]:
    """Return the folders of all runs in a Trainer's folder, oldest first."""
    return [runs.child(name) for name in run_names(runs)]


def list_manifests(runs: Storage) -> list[tuple[CheckpointStore, Manifest]]:
    """Return the manifests of all runs in a Trainer's folder, each with the store that it is in; oldest first."""
    stores = [CheckpointStore(run.child("checkpoints")) for run in list_runs(runs)]
    return [(store, manifest) for store in stores for manifest in store.list()]


def run_names(runs: Storage) -> list[str]:
    """Return the names ``run_NNN`` in a Trainer's folder, oldest run first."""
    return sorted(filter(_RUN.fullmatch, runs.list_names()), key=lambda name: int(name[4:]))


def find_best(metrics: Sequence[Mapping[str, Any]], policy: RetentionPolicy) -> int | None:
    """Return the place of the best checkpoint of several runs, which are given by their metrics, oldest first.

    Numbers of checkpoints begin again in each run, so the newer of equal ones is that with the later place. None: none has
    the metric.
    """
    best = policy.best([_Placed(place, each) for place, each in enumerate(metrics)])
    return None if best is None else best.number


def make_links(run: Storage, config: CheckpointConfig) -> CheckpointLinks | None:
    """Return what keeps the links of a run, if its config asks for them; a trial of Ray Tune has none."""
    if not config.links or not _RUN.fullmatch(run.name):
        return None
    return CheckpointLinks(run.parent(), run.name, best_by(config))


def best_by(config: CheckpointConfig) -> RetentionPolicy | None:
    """Return what says which checkpoint is ``best``: the first metric of ``keep_best``, or the score; None: nothing does."""
    if config.keep_best:
        return RetentionPolicy(None, *next(iter(config.keep_best.items())))
    if config.score_attribute is not None:
        return RetentionPolicy(None, config.score_attribute, config.score_order)
    return None


@dataclass(frozen=True)
class _Placed:
    """A checkpoint of any run, numbered by its place among all of them."""

    number: int
    metrics: Mapping[str, Any]


def follow(link: Storage) -> Storage | None:
    """Return the checkpoint's folder that a file ``last`` or ``best`` leads to; None if it is not such a file."""
    if link.name not in (LAST, BEST) or link.is_local:
        return None
    target = read_link(link.parent(), link.name)
    return None if target is None else link.parent().child(*target.split("/"))


def read_link(runs: Storage, link: str) -> str | None:
    """Return where ``last`` or ``best`` leads: ``run_001/checkpoints/checkpoint_000003``; None without such a name."""
    try:
        if runs.is_local:
            target = os.readlink(runs.path_of(link))
        else:
            target = runs.read_bytes(link, _MAX_BYTES).decode(errors="replace")
    except (OSError, CheckpointNotFoundError, CheckpointCorruptError):  # there is none, or something else of that name
        return None
    return target if _TARGET.fullmatch(target) else None
