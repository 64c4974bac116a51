"""`check_history`: checks that the files of a run keep raysgd's promises. Needs no Ray.

The rules are pure functions of a `History`, in `raysgd.testing.invariants`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable

from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller import frames as f
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import stored_frames
from raysgd.testing import invariants
from raysgd.testing.record import History, read_stored

#: The time for a run with a known outcome to close: an error is raised first, cleaning up follows.
CLOSING_TIMEOUT_S = 30.0
_POLL_S = 0.05

_RULES: tuple[Callable[[History], Iterable[str]], ...] = (
    invariants.journal_is_complete,
    invariants.run_ends_once,
    invariants.attempts_follow_each_other,
    invariants.only_one_group_lives,
    invariants.reports_are_complete,
    invariants.rounds_are_complete,
    invariants.attempts_start_from_newest_checkpoint,
    invariants.retries_are_counted,
    invariants.error_names_the_cause,
    invariants.run_never_stalls,
    invariants.committed_checkpoints_can_be_loaded,
    invariants.no_other_files_exist,
)


class HistoryError(AssertionError):
    """A run broke promises.

    Attributes:
        violations: A sentence for each broken promise.
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
    """Check the files of a run that has ended: its journal, its metrics and its checkpoints.

    It may be called as soon as the run has returned or raised, and waits until the last file is written. A run that was lost
    with its TrainerActor is checked up to the end of its journal; its missing end is a violation.

    - The journal is complete, and the run has exactly one end.
    - Attempts are numbered without gaps and follow each other: only one group lives at a time.
    - Iterations have no gaps; a repeated one has a higher attempt; none up to a checkpoint is lost.
    - An attempt starts from the newest checkpoint committed before it, unless an event says that it was skipped.
    - Retries and re-entries of train_func match, and are no more than allowed.
    - Every checkpoint that was reported and not deleted exists, is complete, and loads; no other files exist.
    - The error of a failed run names what failed first.

    Args:
        run_dir: The run's folder, path or URI.
        max_failures: The limit in `FailureConfig`; None: the limit in the run's description.
        within_s: The longest time without a report or an event, not counting samples of the load; None: any.

    Raises:
        HistoryError: The error lists all violations.
        CheckpointNotFoundError: The folder is not a run's.
    """
    storage = Storage.from_uri(run_dir)
    history = _read(storage, max_failures, within_s)
    if violations := find_violations(history):
        raise HistoryError(storage.uri, tuple(violations))


def find_violations(history: History) -> list[str]:
    """Return a sentence for each broken promise."""
    return [violation for rule in _RULES for violation in rule(history)]


def _read(storage: Storage, max_failures: int | None, within_s: float | None) -> History:
    frames = _frames(storage)
    if max_failures is None and storage.exists("run.json"):
        max_failures = json.loads(storage.read_bytes("run.json")).get("failure_config", {}).get("max_failures")
    stored = read_stored(CheckpointStore(storage.child("checkpoints")))
    return History(tuple(frames), stored, max_failures, within_s)


def _frames(storage: Storage) -> list[Frame]:
    """Read the journal. A lost run's counts up to its first gap, because its files were flushed one after the other."""
    deadline = time.monotonic() + CLOSING_TIMEOUT_S
    while True:
        frames = stored_frames(storage)
        kinds = {frame.kind for frame in frames}
        if f.RUN_CLOSED in kinds:
            return frames
        if f.RUN_END not in kinds or time.monotonic() > deadline:
            return [frame for place, frame in enumerate(frames) if frame.seq <= place]
        time.sleep(_POLL_S)
