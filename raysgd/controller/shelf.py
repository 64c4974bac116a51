"""The checkpoints of a run that are committed: which to keep, which to go on from. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # requests need this module's records alone, before the TrainerActor asks for its workers
    from raysgd.checkpoint.manifest import Manifest
    from raysgd.checkpoint.retention import RetentionPolicy


@dataclass(frozen=True)
class Start:
    """What an attempt goes on from: a checkpoint, or (without both) the run's initial state, if any; and the counters.

    Attributes:
        uri: Where it is on storage.
        held: It is in the cluster's memory, which comes first.
    """

    uri: str | None = None
    iteration: int = 0
    time_total_s: float = 0.0
    number: int = 0
    held: Manifest | None = None

    @property
    def is_checkpoint(self) -> bool:
        return self.uri is not None or self.held is not None

    def counters(self) -> dict[str, Any]:
        """Where the attempt's iterations and time go on."""
        return {"iterations_before": self.iteration, "time_before_s": self.time_total_s}

    def place(self) -> dict[str, Any]:
        """Where the checkpoint is: on storage, and as which number in memory."""
        return {"checkpoint": self.uri, "memory": None if self.held is None else self.number}


class Shelf:
    """Committed checkpoints of one run, oldest first."""

    def __init__(self, start: Start, retention: RetentionPolicy) -> None:
        self._start = start
        self._retention = retention
        self._manifests: dict[int, Manifest] = {}
        self._scores: dict[int, tuple[dict[str, Any] | None, float]] = {}

    @property
    def newest(self) -> Manifest | None:
        return self._manifests[max(self._manifests)] if self._manifests else None

    def add(self, manifest: Manifest) -> tuple[Manifest, list[int]]:
        """Put a committed checkpoint on the shelf; returns it as it is known here, and the numbers that may go."""
        manifest = self.scored(manifest)
        self._manifests[manifest.number] = manifest
        doomed = self._retention.to_delete(list(self._manifests.values()))
        for number in doomed:
            del self._manifests[number]
        return manifest, doomed

    def has_older_than(self, number: int) -> bool:
        """Whether ``number`` is here, and one before it."""
        return number in self._manifests and min(self._manifests) < number

    def drop(self, number: int) -> None:
        """It is not there any more."""
        self._manifests.pop(number, None)

    def score(self, number: int, metrics: dict[str, Any] | None, time_total_s: float = 0.0) -> Manifest | None:
        """A checkpoint belongs to the round with these metrics; the manifest that says so, or None if it is not here.

        With None it belongs to that round and keeps its own metrics. A score may come before its checkpoint is
        committed; it is kept until then.
        """
        known = self._manifests.get(number)
        if known is None:
            self._scores[number] = metrics, time_total_s
            return None
        self._manifests[number] = self._amended(known, metrics, time_total_s)
        return self._manifests[number]

    def scored(self, manifest: Manifest) -> Manifest:
        """A checkpoint that is to be committed, with its score if that came before."""
        score = self._scores.pop(manifest.number, None)
        return manifest if score is None else self._amended(manifest, *score)

    def forget_scores(self, numbers: Iterable[int] | None = None) -> None:
        """Those of these checkpoints; by default of all that never came: the next attempt gives their numbers to others."""
        for number in list(self._scores) if numbers is None else numbers:
            self._scores.pop(number, None)

    def start(self, uri_of: Callable[[int], str]) -> Start:
        """Where the next attempt goes on: the newest checkpoint, or where the run began."""
        newest = self.newest
        if newest is None:
            return self._start
        return Start(uri_of(newest.number), newest.iteration, newest.time_total_s, newest.number)

    @staticmethod
    def _amended(manifest: Manifest, metrics: dict[str, Any] | None, time_total_s: float) -> Manifest:
        """The checkpoint belongs to the round after it, which is counted with it: resuming goes on after that round."""
        metrics = manifest.metrics if metrics is None else metrics
        time_total_s = max(manifest.time_total_s, time_total_s)
        return replace(manifest, metrics=metrics, iteration=manifest.iteration + 1, time_total_s=time_total_s)
