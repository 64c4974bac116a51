"""The committed checkpoints of a run: which to keep, which to start from, which ranks may still read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raysgd.controller.run_plan import Start

if TYPE_CHECKING:
    from raysgd.checkpoint.format.manifest import Manifest
    from raysgd.checkpoint.retention import Record, RetentionPolicy
    from raysgd.controller.checkpoints.pending import Score


class CheckpointIndex:
    """The committed checkpoints of one run, oldest first.

    The manifests of all but the newest are here without their parts and rank states, which take 30 kB of memory for each rank.

    Args:
        start: Where the run began.
        retention: Which checkpoints are kept.
        earlier: Checkpoints of earlier runs that count with those of this run; their numbers are below 1.
    """

    def __init__(self, start: Start, retention: RetentionPolicy, earlier: Sequence[Record] = ()) -> None:
        self._start = start
        self._retention = retention
        self._earlier = {each.number: each for each in earlier}
        self._manifests: dict[int, Manifest] = {}

    @property
    def manifests(self) -> list[Manifest]:
        """The manifests, oldest first."""
        return [self._manifests[number] for number in sorted(self._manifests)]

    @property
    def newest(self) -> Manifest | None:
        return self._manifests[max(self._manifests)] if self._manifests else None

    def add(self, manifest: Manifest) -> list[int]:
        """Add a committed checkpoint; returns the numbers of the checkpoints to delete, also of earlier runs."""
        self._manifests[manifest.number] = manifest
        newest = max(self._manifests)
        for number, older in list(self._manifests.items()):
            if number < newest and (older.parts or older.rank_states):
                self._manifests[number] = replace(older, parts={}, rank_states={})
        to_delete = self._retention.to_delete([*self._earlier.values(), *self._manifests.values()])
        for number in to_delete:
            del (self._manifests if number > 0 else self._earlier)[number]
        return to_delete

    def has_older_than(self, number: int) -> bool:
        """Return whether checkpoint ``number`` and an older one are in the index."""
        return number in self._manifests and min(self._manifests) < number

    def drop(self, number: int) -> None:
        """Remove a checkpoint that cannot be used any more."""
        self._manifests.pop(number, None)

    def score(self, score: Score) -> Manifest | None:
        """Assign a checkpoint to its round; returns it with the round, or None if it is not in the index or has its round."""
        if (known := self._manifests.get(score.number)) is None or not known.awaits_round:
            return None
        scored = self._manifests[score.number] = known.with_round(score.metrics, score.time_total_s)
        return scored

    def start(self, uri_of: Callable[[int], str]) -> Start:
        """Return where the next attempt starts: the newest checkpoint, or where the run began."""
        newest = self.newest
        if newest is None:
            return self._start
        return Start(uri_of(newest.number), newest.iteration, newest.time_total_s, newest.number)


class CheckpointReads:
    """Gives all ranks of an attempt the same checkpoints, and delays their deletion until all ranks have read them.

    Args:
        first_number: Number of the checkpoint that the attempt's first save makes.
    """

    def __init__(self, first_number: int = 1) -> None:
        self._first_number = first_number
        self._answers: dict[int, int | None] = {}
        self._lists: dict[int, list[Manifest]] = {}
        self._needed_before: dict[int, int] = {}  # by checkpoint, the first one that is saved after it was read
        self._committed = 0
        self._delayed: set[int] = set()

    def newest_for(self, index: int, num_saves: int, newest: int | None) -> int | None:
        """Return the number of the newest checkpoint for the ``index``-th request, the same for all ranks.

        Args:
            index: Number of this rank's request in the attempt.
            num_saves: Saves of each rank before that request.
            newest: The newest checkpoint at the first rank's request.
        """
        number = self._answers.setdefault(index, newest)
        if number is not None:
            self._keep(number, num_saves)
        return number

    def list_for(self, index: int, num_saves: int, stored: list[Manifest]) -> list[Manifest]:
        """Return the checkpoints on storage for the ``index``-th request of a list, the same for all ranks.

        Args:
            index: Number of this rank's request of a list in the attempt.
            num_saves: Saves of each rank before that request.
            stored: The checkpoints at the first rank's request, oldest first.
        """
        listed = self._lists.setdefault(index, stored)
        for manifest in listed:
            self._keep(manifest.number, num_saves)
        return listed

    def _keep(self, number: int, num_saves: int) -> None:
        self._needed_before[number] = max(self._needed_before.get(number, 0), self._first_number + num_saves)

    def can_delete(self, number: int) -> bool:
        """Return whether a checkpoint can be deleted now; if not, `on_committed` or `end` returns it later."""
        if self._needed_before.get(number, 0) <= self._committed:
            return True
        self._delayed.add(number)
        return False

    def on_committed(self, number: int) -> list[int]:
        """Return the checkpoints to delete now: all ranks made save ``number``, so their earlier reads are over."""
        self._committed = max(self._committed, number)
        return self._release({delayed for delayed in self._delayed if self._needed_before[delayed] <= self._committed})

    def end(self) -> list[int]:
        """Return the checkpoints to delete now that the attempt is over."""
        return self._release(set(self._delayed))

    def _release(self, numbers: set[int]) -> list[int]:
        self._delayed -= numbers
        return sorted(numbers)
