"""The worker's side of a checkpoint: a copy in the training thread, writing in a thread of its own, one event when safe.

The queue between them is bounded by the staging buffers: a training loop that saves faster than storage writes waits in
``save_checkpoint`` rather than fill the memory of its node.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from raysgd.checkpoint.shards import ShardWriter
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import CheckpointNotFoundError, StorageError
from raysgd.session.events import PartFailed, PartSafe, Warned, WorkerEvent
from raysgd.session.holding import Job, Payloads

if TYPE_CHECKING:
    from raysgd.checkpoint.snapshot import StagingPool
    from raysgd.checkpoint.storage import Storage

#: Seconds for which one save waits before that is told.
LONG_WAIT_S = 10.0


class CheckpointWriter:
    """Writes this rank's parts of the checkpoints of one attempt.

    Args:
        store: The run's checkpoints.
        attempt: Number of the attempt; part of every file's name, so that a late writer overwrites nothing.
        first_number: Number of the checkpoint that the first call makes.
        pool: Staging buffers, reused from one attempt to the next.
        put: Where events go; called from all threads.
        is_held: Whether each snapshot goes into the cluster's memory as well, by way of `payloads`.
        stored_every: Of the checkpoints those go to storage whose numbers are multiples of it.

    Attributes:
        on_chunk: Called whenever a file, or another piece of one, goes to storage, in the thread that writes it.
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
        self.on_chunk: Callable[[], None] = _nothing
        self._payloads = Payloads(put) if is_held else None
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._has_told = False

    def save(
        self, call: int, state: Any, rank_state: dict[str, Any], *, trusted: bool, shared_by: int | None = None
    ) -> None:
        """Copy ``state`` into host memory and queue it for writing; waits while both staging buffers are in use.

        Args:
            call: Number of the save, from 0.
            state: What is saved.
            rank_state: What is saved of this rank beside it.
            trusted: Pickle what nothing else can hold.
            shared_by: How many ranks save parts; arrays that are distributed over them are then saved in shards. None: this
                one saves for all.
        """
        from raysgd.checkpoint.snapshot import take_snapshot  # NumPy: the controller imports this module without it

        waited_s = self._pool.waited_s
        shards = None if shared_by is None else ShardWriter(shared_by)
        snapshot = take_snapshot(state, self._pool, trusted=trusted, shards=shards)
        self._tell_of_wait(self._pool.waited_s - waited_s)
        is_stored = (self._first_number + call) % self._stored_every == 0
        job = Job(call, snapshot, rank_state, is_stored + (self._payloads is not None))
        if self._payloads is not None:
            self._payloads.offer(job)
        if is_stored:
            self._start()
            self._jobs.put(job)

    def save_files(self, call: int, path: Any, rank_state: dict[str, Any]) -> None:
        """Copy the user's file or folder to storage; returns when it is there, so that the caller may delete it.

        Storage that fails is told as in `save`; a source that is not there, or cannot be read, is the caller's mistake.
        """
        source = os.path.abspath(os.fspath(path))
        try:
            entries = self._folder(call).put_path(source, self._prefix)
        except (StorageError, CheckpointNotFoundError) as error:
            if _is_of_source(error, source):
                raise
            self._put(PartFailed(call, f"{type(error).__name__}: {error}"))
        else:
            self._put(PartSafe(call, tuple((e.name, e.size, e.crc32) for e in entries), rank_state))

    def save_nothing(self, call: int, rank_state: dict[str, Any]) -> None:
        """The part of a rank that gives no state: what its generators and its data position are."""
        self._put(PartSafe(call, (), rank_state))

    def payloads(self) -> Iterator[Any]:
        """What is to be held in the cluster's memory, for the one stream that takes it there; see `Payloads`."""
        return iter(()) if self._payloads is None else self._payloads.take_all()

    def close(self, *, wait_held: bool = False) -> None:
        """Wait until all that was queued is written or has failed.

        Args:
            wait_held: Wait also until it is in memory, for a while.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._payloads is not None:
            self._payloads.close(wait=wait_held)

    def _tell_of_wait(self, seconds: float) -> None:
        if seconds >= LONG_WAIT_S and not self._has_told:
            self._has_told = True
            self._put(
                Warned(
                    f"save_checkpoint waited {seconds:.0f} s for the checkpoints before it to be written: storage is slower "
                    "than they are made. Save less often, or give CheckpointConfig(memory_only_between=n)."
                )
            )

    def _folder(self, call: int) -> Storage:
        return self._store.directory(self._first_number + call).telling(self.on_chunk)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="raysgd-checkpoint-writer", daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                entries = job.snapshot.write(self._folder(job.call), self._prefix)
                files = tuple((entry.name, entry.size, entry.crc32) for entry in entries)
                self._put(PartSafe(job.call, files, job.rank_state, job.snapshot.beside()))
            except Exception as error:  # it must reach the controller, whatever it is
                self._put(PartFailed(job.call, f"{type(error).__name__}: {error}"))
            finally:
                job.done()


def _is_of_source(error: Exception, source: str) -> bool:
    """Whether a copy failed for what it reads, rather than for where it writes."""
    if error.__cause__ is None:  # found out by looking at the source
        return True
    name = getattr(error.__cause__, "filename", None)
    return isinstance(name, str) and (name == source or name.startswith(source + os.sep))


def _nothing() -> None:
    pass
