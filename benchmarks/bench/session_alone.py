"""A worker's session without Ray, in this process: its events are drained and encoded as in a worker, and go nowhere."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any, cast

from raysgd.checkpoint.format.parts import StoredPart
from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import PartFailed, PartSafe, Reports, Warned, WorkerEvent
from raysgd.session.saving import CheckpointWriter
from raysgd.session.worker import Codec, WorkerSession

#: Seconds between two batches of events, as for a single worker.
_FLUSH_S = 0.002


class SessionAlone:
    """What `raysgd.report` and `raysgd.save_checkpoint` act on inside its ``with`` block. Nothing commits checkpoints.

    Args:
        folder: Where checkpoints are written.
    """

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self._queue = EventQueue(_FLUSH_S)
        self._events: list[WorkerEvent] = []
        self._store = CheckpointStore(Storage.from_uri(folder))
        self._writer = CheckpointWriter(
            self._store, attempt=1, rank=rank, first_number=1, pool=StagingPool(), put=self._queue.put
        )
        self._session = WorkerSession(
            Identity(rank, world_size, rank, world_size),
            event_queue=self._queue,
            writer=self._writer,
            link=cast(Any, None),
            codec=Codec(pickle.dumps, pickle.loads),
            start=None,
            time_before_s=0.0,
            seed=None,
            deterministic=False,
        )
        self._is_over = False
        self._drainer = threading.Thread(target=self._drain, name="raysgd-alone", daemon=True)

    def __enter__(self) -> SessionAlone:
        self._drainer.start()
        context.install(self._session)
        return self

    def __exit__(self, *_: object) -> None:
        context.uninstall()
        self._session.close()
        self._writer.close()
        self._is_over = True
        self._queue.wake()
        self._drainer.join()

    def reports(self) -> list[dict[str, Any]]:
        """Return the metrics reported so far, as the controller would get them."""
        self._flush()
        batches = [event.rows for event in self._events if isinstance(event, Reports)]
        return [metrics for batch in batches for _, _, metrics in json.loads(batch)]

    def saved(self) -> list[Any]:
        """Wait until all saves are written; return the states that the files hold, in the order of the saves."""
        self._writer.close()
        self._flush()
        if failed := [event.error for event in self._events if isinstance(event, PartFailed)]:
            raise RuntimeError(failed[0])
        parts = sorted((event for event in self._events if isinstance(event, PartSafe)), key=lambda part: part.call)
        return [StoredPart(self._store.directory(1 + part.call), part.files).load(allow_pickle=False) for part in parts]

    def _flush(self) -> None:
        """Wait until everything that was put so far has been read and drained."""
        self._queue.settle()
        mark = Warned("all before this is drained")
        self._queue.put(mark, urgent=True)
        while not any(event is mark for event in self._events):
            time.sleep(0.001)

    def _drain(self) -> None:
        while not self._is_over:
            self._events += self._queue.drain(1.0)
