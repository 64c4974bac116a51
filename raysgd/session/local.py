"""The session of single-machine use: a world of one rank, so that a train_func runs without a Trainer and without Ray."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from os import PathLike
from typing import Any

from raysgd._util.logs import get_logger
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.data.streams.stream import fetch_object
from raysgd.errors import CheckpointError
from raysgd.session import rank_state
from raysgd.session.base import Identity, Session
from raysgd.session.events import PartFailed, PartSafe, WorkerEvent
from raysgd.session.metrics import copy_metrics, has_deferred, read_deferred
from raysgd.session.saving import CheckpointWriter


class LocalSession(Session):
    """A world of one rank. ``report`` logs a line, and checkpoints go to ``directory`` if one is given."""

    def __init__(self, directory: str | PathLike[str] | None = None, plan: DatasetPlan = NO_DATASETS) -> None:
        super().__init__(Identity(), plan=plan, fetch=fetch_object)
        self._store = None if directory is None else CheckpointStore(Storage.from_uri(directory))
        self._num_reports = 0
        self._log = ReportLog()

    def report(self, metrics: Mapping[str, Any]) -> None:
        copied = copy_metrics(metrics)
        self._num_reports += 1
        self._log.put(self._num_reports, copied)

    def save_checkpoint(
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, allow_pickle: bool
    ) -> None:
        if self._store is None:
            return
        self._store.storage.make_dirs()
        number = max((manifest.number for manifest in self._store.list()), default=0) + 1
        part = self._write_part(self._store, number, state, files, all_ranks, allow_pickle)
        self._store.commit(
            Manifest(
                number=number,
                attempt=1,
                iteration=self._num_reports,
                time_total_s=0.0,
                world_size=1,
                metrics=read_deferred(copy_metrics(metrics or {})),
                all_ranks=all_ranks,
                is_files=files,
                allow_pickle=allow_pickle,
                is_reshardable=part.unsharded_digest is not None,
                created_s=time.time(),
                parts={0: list(part.files)},
                rank_states={0: part.rank_state},
            )
        )

    def load_checkpoint(self, path: Any, *, allow_pickle: bool) -> Any:
        if path is not None:
            return Checkpoint.from_path(path).load(allow_pickle=allow_pickle)
        if self._store is None or not (manifests := self._store.list()):
            return None
        newest = manifests[-1]
        state = Checkpoint.from_path(self._store.path(newest.number)).load(allow_pickle=allow_pickle)
        small = rank_state.inherit(newest.rank_states, 0, is_same_size=newest.world_size == 1)
        rank_state.restore(small, self._datasets)
        return state

    def list_checkpoints(self) -> list[Checkpoint]:
        store = self._store
        if store is None:
            return []
        return [Checkpoint.of_manifest(store.path(manifest.number), manifest) for manifest in store.list()]

    def should_stop(self) -> bool:
        return False

    def barrier(self) -> None:
        return None

    def broadcast(self, obj: Any) -> Any:
        return obj

    def gather(self, obj: Any) -> list[Any]:
        return [obj]

    def _write_part(
        self, store: CheckpointStore, number: int, state: Any, files: bool, all_ranks: bool, allow_pickle: bool
    ) -> PartSafe:
        from raysgd.checkpoint.snapshot import StagingPool  # imports NumPy, and every driver imports this module

        events: list[WorkerEvent] = []
        pool = StagingPool(num_buffers=1)
        writer = CheckpointWriter(store, attempt=1, rank=0, first_number=number, pool=pool, put=events.append)
        small = rank_state.capture(self._datasets)
        if files and all_ranks and state is None:
            writer.save_nothing(0, small)
        elif files:
            writer.save_files(0, state, small)
        else:
            writer.save(0, state, small, allow_pickle=allow_pickle, shared_by=1 if all_ranks else None)
        writer.close()
        part = events[0]
        if isinstance(part, PartFailed):
            raise CheckpointError(f"save_checkpoint could not write checkpoint {number}: {part.error}")
        assert isinstance(part, PartSafe)
        return part


class ReportLog:
    """Logs reports in their order. Where a value is on a device, a thread waits for it, not the caller."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self._is_running = False
        self._lock = threading.Lock()

    def put(self, number: int, metrics: dict[str, Any]) -> None:
        """Log a report, or leave it to the thread if a value of it, or of an earlier report, is on a device."""
        with self._lock:
            is_read = not self._is_running and not has_deferred(metrics)
            starts = not self._is_running and not is_read
            if not is_read:
                self._waiting.append((number, metrics))
                self._is_running = True
        if is_read:
            _log_report(number, metrics)
        elif starts:  # Python waits for the thread at exit, so no line is lost
            threading.Thread(target=self._log_all, name="raysgd-report").start()

    def _log_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                number, metrics = self._waiting.popleft()
            try:
                _log_report(number, read_deferred(metrics))
            except Exception as error:  # a device that failed; the loop gets its error, too
                get_logger().error("%d: this report could not be read: %s: %s", number, type(error).__name__, error)


def _log_report(number: int, metrics: dict[str, Any]) -> None:
    values = "  ".join(f"{name}={_short(value)}" for name, value in metrics.items())
    get_logger().info("%d: %s", number, values)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
