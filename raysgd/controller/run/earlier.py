"""The checkpoints of earlier runs in a Trainer's folder that count with those of a run. Runs in the TrainerActor, in threads.

The state machine decides which are deleted, as for the run's own. Here they are deleted, except those that something needs by
now: they are tried again after each commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.links import BEST, LAST, list_manifests, list_runs, place_of, read_link, run_names
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config import CheckpointConfig
from raysgd.controller.journal.journal import first_event, is_live
from raysgd.errors import CheckpointError


@dataclass(frozen=True)
class EarlierCheckpoint:
    """A checkpoint of an earlier run.

    Attributes:
        number: Its place before those of the run: 0 for the newest one, -1 for the one before.
    """

    number: int
    metrics: Mapping[str, Any]


class EarlierCheckpoints:
    """The checkpoints that earlier runs have left.

    Args:
        run: The run's folder.
        found: They, oldest first, each with the store that it is in.

    Attributes:
        records: What retention needs to know of them.
    """

    def __init__(self, run: Storage, found: Sequence[tuple[CheckpointStore, Manifest]]) -> None:
        self._run = run
        places = range(1 - len(found), 1)
        self.records = [EarlierCheckpoint(n, each.metrics) for n, (_, each) in zip(places, found, strict=True)]
        self._found = {n: (store, each.number) for n, (store, each) in zip(places, found, strict=True)}
        self._unwanted: set[int] = set()
        self._ended: set[str] = set()  # names of runs

    def delete(self, numbers: Collection[int] = ()) -> None:
        """Delete these, and those that something has needed before, unless something needs them now."""
        self._unwanted.update(numbers)
        if not self._unwanted:
            return
        with contextlib.suppress(CheckpointError):  # it is not known what is needed
            needed = tuple(self._needed())
            for number in sorted(self._unwanted):
                store, own_number = self._found[number]
                if not place_of(store, own_number).startswith(needed):
                    store.delete(own_number)
                    self._unwanted.discard(number)

    def _needed(self) -> Iterator[str]:
        """Yield the paths in the Trainer's folder of checkpoints, and of folders of runs, that must stay."""
        runs = self._run.parent()
        yield from filter(None, (read_link(runs, LAST), read_link(runs, BEST)))
        for run in list_runs(runs):
            if run.name == self._run.name or run.name in self._ended:
                continue
            if not is_live(run):
                self._ended.add(run.name)
                continue
            yield f"{run.name}/"
            if not CheckpointStore(run.child("checkpoints")).list():  # it would begin there again
                start = str(first_event(run).get("resumed_from")).partition("?")[0]
                yield "/".join(start.rstrip("/").split("/")[-3:])


def find_earlier(run: Storage, config: CheckpointConfig) -> EarlierCheckpoints | None:
    """Return the checkpoints of earlier runs in the folder of a run, if they count; reads their manifests."""
    names = run_names(run.parent())
    if config.scope == "run" or config.num_to_keep is None or run.name not in names:
        return None
    before = names[: names.index(run.name)]
    return EarlierCheckpoints(
        run,
        [each for each in list_manifests(run.parent()) if each[0].storage.parent().name in before],
    )
