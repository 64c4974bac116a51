"""Snapshots on their way into the cluster's memory. Worker side.

What a worker's Ray stream yields belongs to the TrainerActor and outlives the worker, so that is how a checkpoint gets out of
the process that made it: the writer offers each snapshot, a stream of its own takes their bytes. Where the stream breaks off,
as when the object store is full, later checkpoints are on storage alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from raysgd.session.events import HoldFailed, PartHeld, WorkerEvent

if TYPE_CHECKING:
    from raysgd.checkpoint.snapshot import Snapshot

#: Seconds that the last payloads of an attempt have to be taken.
TAKE_S = 10.0


class Job:
    """A snapshot that goes to several places; its buffer is free again when all are done with it.

    Args:
        uses: How many these are.
    """

    def __init__(self, call: int, snapshot: Snapshot, rank_state: dict[str, Any], uses: int) -> None:
        self.call = call
        self.snapshot = snapshot
        self.rank_state = rank_state
        self._uses = uses
        self._lock = threading.Lock()

    def done(self) -> None:
        """One of them is."""
        with self._lock:
            self._uses -= 1
            is_last = self._uses == 0
        if is_last:
            self.snapshot.release()


class Payloads:
    """The queue between a writer and the stream. `offer` and `close` by the training thread, `take_all` by the stream's.

    Args:
        put: Where events go.
    """

    def __init__(self, put: Callable[[WorkerEvent], None]) -> None:
        self._put = put
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._num_offered = 0
        self._over = threading.Event()

    def offer(self, job: Job) -> None:
        """Have a snapshot taken; it is told to be held, or to have failed."""
        with self._lock:
            if self._broken is None:
                self._num_offered += 1
                self._jobs.put(job)
                return
        self._fail(job, self._broken)

    def take_all(self) -> Iterator[Any]:
        """Payloads, each a uint8 array that is valid until the next is asked for; ends with `close`."""
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    yield job.snapshot.payload()
                except BaseException:  # closed in the middle: it was not taken
                    self._fail(job, "the stream to the cluster's memory broke off")
                    raise
                snapshot = job.snapshot
                self._put(PartHeld(job.call, snapshot.num_bytes, job.rank_state, snapshot.beside()))
                job.done()
        finally:
            self._break("the stream to the cluster's memory broke off")
            self._over.set()

    def close(self, *, wait: bool) -> None:
        """No more will come.

        Args:
            wait: For those that were offered to be taken, for a while.
        """
        if wait and self._num_offered:
            self._jobs.put(None)
            self._over.wait(TAKE_S)
        self._break("the attempt is over")
        self._jobs.put(None)

    def _break(self, why: str) -> None:
        """Give up those that wait, and all to come."""
        left = []
        with self._lock:
            self._broken = self._broken or why
            while not self._jobs.empty():
                left.append(self._jobs.get_nowait())
        for job in left:
            if job is not None:
                self._fail(job, why)

    def _fail(self, job: Job, why: str) -> None:
        self._put(HoldFailed(job.call, why))
        job.done()
