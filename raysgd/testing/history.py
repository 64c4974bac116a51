"""`check_history`: whether what a run left behind keeps raysgd's promises. Driver side, or anywhere; needs no Ray.

The rules are in `raysgd.testing.invariants` and `raysgd.testing.stored`; both are pure, and get a `History`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable

from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller import frames as f
from raysgd.controller.frames import Frame
from raysgd.controller.journal import stored_frames
from raysgd.testing import invariants, stored
from raysgd.testing.record import History

#: Seconds that a run whose outcome is known may take to be closed: an error is raised first and cleaned up after.
CLOSING_S = 30.0
_LOOK_S = 0.05

_RULES: tuple[Callable[[History], Iterable[str]], ...] = (
    invariants.frames_are_whole,
    invariants.ends_once,
    invariants.attempts_follow_each_other,
    invariants.one_group_lives,
    invariants.reports_are_whole,
    invariants.rounds_are_whole,
    invariants.attempts_start_where_they_should,
    invariants.retries_are_counted,
    invariants.the_error_is_named,
    invariants.it_never_stands_still,
    stored.what_counts_can_be_loaded,
    stored.nothing_else_is_there,
)


class HistoryError(AssertionError):
    """A run broke promises.

    Attributes:
        violations: One sentence each.
    """

    def __init__(self, run_dir: str, violations: tuple[str, ...]) -> None:
        super().__init__(run_dir, violations)
        self.run_dir = run_dir
        self.violations = violations

    def __str__(self) -> str:
        return "\n".join([f"{self.run_dir} breaks {len(self.violations)} promises:", *self.violations])


def check_history(
    run_dir: str | os.PathLike[str], *, max_failures: int | None = None, within_s: float | None = None
) -> None:
    """Check the files of a run that is over: its journal, its metrics, its checkpoints.

    It may be called as soon as the run has returned or raised; it waits until the last file is written. Of a run that was
    lost, with its controller, only what its journal still has is judged, and that it has no end.

    - Nothing of the journal is missing, and the run has exactly one end.
    - Attempts are numbered without gaps and follow each other: one group lives at a time.
    - Iterations have no gaps; one that was made again has a higher attempt; none up to a checkpoint is lost.
    - An attempt starts from the newest checkpoint committed before it, unless an event says that it was passed over.
    - There is a re-entry for each retry and a retry for each re-entry, as many as are allowed.
    - Every checkpoint that was told of and not deleted is there, complete, and loads; nothing else is there.
    - The error of a run that failed names what failed first.

    Args:
        run_dir: The run's folder, path or URI.
        max_failures: What `FailureConfig` allows; None: as the run's description says.
        within_s: The longest time that the run may go without a report or an event (samples of the load are none);
            None: any.

    Raises:
        HistoryError: With all that is wrong.
        CheckpointNotFoundError: The folder is no run's.
    """
    storage = Storage.from_uri(run_dir)
    history = _read(storage, max_failures, within_s)
    if violations := find_violations(history):
        raise HistoryError(storage.uri, tuple(violations))


def find_violations(history: History) -> list[str]:
    """What is wrong with a history, in sentences."""
    return [violation for rule in _RULES for violation in rule(history)]


def _read(storage: Storage, max_failures: int | None, within_s: float | None) -> History:
    frames = _frames(storage)
    if max_failures is None and storage.exists("run.json"):
        max_failures = json.loads(storage.read_bytes("run.json")).get("failure", {}).get("max_failures")
    found = stored.read_stored(CheckpointStore(storage.child("checkpoints")))
    return History(tuple(frames), found, max_failures, within_s)


def _frames(storage: Storage) -> list[Frame]:
    """The journal; of a lost run up to the first gap, since its files were flushed one after the other."""
    deadline = time.monotonic() + CLOSING_S
    while True:
        frames = stored_frames(storage)
        kinds = {frame.kind for frame in frames}
        if f.RUN_CLOSED in kinds:
            return frames
        if f.RUN_END not in kinds or time.monotonic() > deadline:
            return [frame for place, frame in enumerate(frames) if frame.seq <= place]
        time.sleep(_LOOK_S)
