"""Writes the steps of this rank in detail to the run's folder, for ``raysgd trace``. Worker side."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from raysgd._util.logs import get_logger
from raysgd.errors import StorageError
from raysgd.goodput.spans import RankSteps, file_name

if TYPE_CHECKING:
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.session.progress import Progress

#: Seconds between two writes. A thousand workers make 17 writes a second, each of some 50 KB.
INTERVAL_S = 60.0
#: Seconds that the end of an attempt waits for the last write.
MAX_WAIT_S = 5.0


class StepFile:
    """The file of one rank in one attempt, which is written again as a whole: it is small.

    A thread of its own writes, because storage may be slow; a write that fails does not disturb training.

    Args:
        folder: The folder of the run's files of this kind.
        progress: Has the steps.
    """

    def __init__(
        self, folder: Storage, progress: Progress, *, attempt: int, rank: int, node: str, iterations_before: int
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._attempt, self._rank, self._node = attempt, rank, node
        self._iterations_before = iterations_before
        self._due_at = time.monotonic() + INTERVAL_S
        self._thread: threading.Thread | None = None

    def write_if_due(self) -> None:
        """Begin to write the file, if some time has passed and the last write is done."""
        if time.monotonic() >= self._due_at and (self._thread is None or not self._thread.is_alive()):
            self.write(is_over=False)

    def write(self, *, is_over: bool) -> None:
        """Begin to write the file, unless no step has begun; ``is_over``: train_func has left."""
        self._due_at = time.monotonic() + INTERVAL_S
        if self._progress.spent.steps:
            before, left_s = self._thread, time.monotonic() if is_over else None
            self._thread = threading.Thread(
                target=self._write, args=(before, left_s), name="raysgd-step-file", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Wait until the last write is done, for a limited time."""
        if self._thread is not None:
            self._thread.join(MAX_WAIT_S)

    def _write(self, before: threading.Thread | None, left_s: float | None) -> None:
        if before is not None:
            before.join()
        clock, now = self._progress.node_clock, time.monotonic()
        steps = RankSteps(
            self._attempt,
            self._rank,
            self._node,
            self._iterations_before,
            time.time() - now if clock is None else clock.ahead_s,
            None if clock is None else clock.error_s,
            left_s is not None,
            self._progress.steps(now if left_s is None else left_s),
        )
        try:
            self._folder.write_bytes(file_name(self._attempt, self._rank), steps.encode())
        except (StorageError, OSError) as error:
            get_logger().debug("the steps could not be written: %s", error)
