"""The worker's side of a checkpoint: a copy in the training thread, and writing in a thread of its own.

The staging buffers bound the queue between the two. A training loop that saves faster than storage writes waits in
``save_checkpoint``, and does not fill the memory of its node.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from raysgd.checkpoint.codecs.shards import ShardWriter
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import CheckpointNotFoundError, StorageError
from raysgd.session.events import HoldFailed, PartFailed, PartHeld, PartSafe, Warned, WorkerEvent, is_copy

if TYPE_CHECKING:
    from raysgd.checkpoint.snapshot import Snapshot, StagingPool
    from raysgd.checkpoint.storage.storage import Storage


#: Seconds in which the last payloads of an attempt must be taken.
TAKE_S = 10.0
#: Seconds that one save waits before a warning.
LONG_WAIT_S = 10.0


class Job:
    """A snapshot that goes to several destinations; its buffer is free again when all of them are done with it.

    Args:
        began: When the training thread called, by `time.monotonic`.
        uses: The number of destinations.
    """

    def __init__(self, call: int, snapshot: Snapshot, rank_state: dict[str, Any], began: float, uses: int) -> None:
        self.call = call
        self.began = began
        self.snapshot = snapshot
        self.rank_state = rank_state
        self._uses = uses
        self._lock = threading.Lock()

    def done(self) -> None:
        """Note that one destination is done with the snapshot."""
        with self._lock:
            self._uses -= 1
            is_last = self._uses == 0
        if is_last:
            self.snapshot.release()


class Payloads:
    """The queue between a writer and the memory stream. The training thread offers and closes; the stream's thread takes.

    Args:
        put: Receives events.
    """

    def __init__(self, put: Callable[[WorkerEvent], None]) -> None:
        self._put = put
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._num_offered = 0
        self._over = threading.Event()

    def offer(self, job: Job) -> None:
        """Queue a snapshot for the cluster's memory; an event says whether it is held there or failed."""
        with self._lock:
            if self._broken is None:
                self._num_offered += 1
                self._jobs.put(job)
                return
        self._fail(job, self._broken)

    def take_all(self) -> Iterator[Any]:
        """Yield payloads, each a uint8 array that is valid until the next is asked for; ends with `close`."""
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    yield job.snapshot.payload()
                except BaseException:  # closed in the middle: it was not taken
                    self._fail(job, "the stream to the cluster's memory broke off")
                    raise
                snapshot = job.snapshot
                self._put(PartHeld(job.call, snapshot.num_bytes, job.rank_state, snapshot.unsharded_digest()))
                job.done()
        finally:
            self._break("the stream to the cluster's memory broke off")
            self._over.set()

    def close(self, *, wait: bool) -> None:
        """Accept no more snapshots.

        Args:
            wait: Wait a limited time until those that were offered are taken.
        """
        if wait and self._num_offered:
            self._jobs.put(None)
            self._over.wait(TAKE_S)
        self._break("the attempt is over")
        self._jobs.put(None)

    def _break(self, why: str) -> None:
        """Fail the snapshots that wait, and all later ones."""
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


class CheckpointWriter:
    """Writes this rank's parts of the checkpoints of one attempt.

    Args:
        store: The run's checkpoints.
        attempt: Number of the attempt; part of every file's name, so that a late writer overwrites nothing.
        first_number: Number of the checkpoint that the first call makes.
        pool: Staging buffers, reused from one attempt to the next.
        put: Receives events; called from all threads.
        is_held: Whether each snapshot also goes into the cluster's memory, through `payloads`.
        stored_every: Checkpoints whose numbers are multiples of it go to storage.

    Attributes:
        is_held: See above.
        on_chunk: Called whenever a file, or a part of one, is written to storage, in the writing thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        attempt: int,
        rank: int,
        first_number: int,
        pool: StagingPool,
        put: Callable[[WorkerEvent], None],
        is_held: bool = False,
        stored_every: int = 1,
    ) -> None:
        self._store = store
        self._prefix = part_prefix(attempt, rank)
        self._first_number = first_number
        self._pool = pool
        self._put = put
        self._stored_every = stored_every
        self.on_chunk: Callable[[], None] = lambda: None
        self.is_held = is_held
        self._payloads = Payloads(put) if is_held else None
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def save(
        self, call: int, state: Any, rank_state: dict[str, Any], *, allow_pickle: bool, shared_by: int | None = None
    ) -> None:
        """Copy ``state`` into host memory and queue it for writing; waits while both staging buffers are in use.

        Args:
            call: Number of the save, from 0, or of a copy of a live state.
            state: The state to save.
            rank_state: The small state of this rank; see `raysgd.session.rank_state`.
            allow_pickle: Pickle what nothing else can hold.
            shared_by: How many ranks save parts; arrays that are distributed over them are then saved in shards. None: this
                rank saves for all.
        """
        from raysgd.checkpoint.snapshot import take_snapshot  # NumPy: the controller imports this module without it

        began, waited_s = time.monotonic(), self._pool.waited_s
        shards = None if shared_by is None else ShardWriter(shared_by)
        snapshot = take_snapshot(state, self._pool, allow_pickle=allow_pickle, shards=shards)
        self._warn_of_wait(self._pool.waited_s - waited_s)
        is_stored = not is_copy(call) and (self._first_number + call) % self._stored_every == 0
        job = Job(call, snapshot, rank_state, began, is_stored + (self._payloads is not None))
        if self._payloads is not None:
            self._payloads.offer(job)
        if is_stored:
            self._start()
            self._jobs.put(job)

    def save_files(self, call: int, path: Any, rank_state: dict[str, Any]) -> None:
        """Copy the user's file or folder to storage; returns when it is there, so that the caller may delete it.

        A storage failure becomes an event, as in `save`. A source that is missing or cannot be read raises.
        """
        source, began = os.path.abspath(os.fspath(path)), time.monotonic()
        try:
            entries = self._folder(call).put_path(source, self._prefix)
        except (StorageError, CheckpointNotFoundError) as error:
            if _is_of_source(error, source):
                raise
            self._put(PartFailed(call, f"{type(error).__name__}: {error}"))
        else:
            self._put(PartSafe(call, tuple(entries), rank_state, seconds=time.monotonic() - began))

    def save_nothing(self, call: int, rank_state: dict[str, Any]) -> None:
        """Save the part of a rank that gives no state: its small state only."""
        self._put(PartSafe(call, (), rank_state))

    def payloads(self) -> Iterator[Any]:
        """Return what goes into the cluster's memory, for the one stream that takes it there; see `Payloads`."""
        return iter(()) if self._payloads is None else self._payloads.take_all()

    def close(self, *, wait_held: bool = False) -> None:
        """Wait until everything that was queued is written or has failed.

        Args:
            wait_held: Wait a limited time until it is in memory, too.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._payloads is not None:
            self._payloads.close(wait=wait_held)

    def _warn_of_wait(self, seconds: float) -> None:
        if seconds >= LONG_WAIT_S and not self._has_warned:
            self._has_warned = True
            self._put(
                Warned(
                    f"save_checkpoint waited {seconds:.0f} s for the checkpoints before it to be written: storage is slower "
                    "than they are made. Save less often, or give CheckpointConfig(storage_interval=n)."
                )
            )

    def _folder(self, call: int) -> Storage:
        return self._store.directory(self._first_number + call).with_progress(self.on_chunk)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="raysgd-checkpoint-writer", daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                entries = job.snapshot.write(self._folder(job.call), self._prefix)
                digest, seconds = job.snapshot.unsharded_digest(), time.monotonic() - job.began
                self._put(PartSafe(job.call, tuple(entries), job.rank_state, digest, seconds))
            except Exception as error:  # the controller must learn of every error
                self._put(PartFailed(job.call, f"{type(error).__name__}: {error}"))
            finally:
                job.done()


def _is_of_source(error: Exception, source: str) -> bool:
    """Return whether a copy failed because of its source, not because of its destination."""
    if error.__cause__ is None:  # found out by looking at the source
        return True
    name = getattr(error.__cause__, "filename", None)
    return isinstance(name, str) and (name == source or name.startswith(source + os.sep))
