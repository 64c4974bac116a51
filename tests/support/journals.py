"""Folders of runs, written by raysgd's own journal without a cluster: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raysgd._util.json import encode_rows
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import Journal

#: When the runs begin, in seconds since the epoch.
STARTED = 1_700_000_000.0


class WrittenRun:
    """A run that is written step by step.

    Args:
        path: Its folder, which is made.
        description: What ``run.json`` has, in addition to the name.
    """

    def __init__(self, path: Path, **description: Any) -> None:
        path.mkdir(parents=True)
        self.path = path
        self.now = STARTED
        self._journal = Journal(Storage.from_uri(path), frozenset())
        self._seq = 0
        self._attempt = 0
        self._counts: dict[int, int] = {}
        self._journal.write_run({"name": path.name, "run_dir": str(path), "started": STARTED, **description})
        self.event("run_start", name=path.name, run_dir=str(path))

    def frame(self, kind: str, data: Mapping[str, Any] | None = None, *, rank: int = -1, rows: bytes = b"") -> None:
        self._journal.append(Frame(self._seq, kind, self._attempt, rank, dict(data or {}), rows))
        self._seq += 1

    def event(self, kind: str, /, **data: Any) -> None:
        self.frame(frames.EVENT, {"kind": kind, "timestamp": self.now, "data": data})

    def begin_attempt(self, pids: Sequence[int], iterations_before: int = 0, checkpoint: str | None = None) -> None:
        """Start an attempt with a worker process for each rank."""
        self._attempt += 1
        self._counts = {}
        for rank, pid in enumerate(pids):
            self.event("worker_up", rank=rank, node="node-1 (192.0.2.1)", pid=pid, gpus=[])
        data = {
            "attempt": self._attempt,
            "world_size": len(pids),
            "iterations_before": iterations_before,
            "time_before_s": float(iterations_before),
        }
        self.frame(frames.ATTEMPT, data)
        self.event("attempt_start", **data, checkpoint=checkpoint, memory=None)
        for rank in range(len(pids)):
            self.event("entered", rank=rank, attempt=self._attempt, timestamp=self.now + 0.5)

    def report(self, *metrics: Mapping[str, Any], rank: int = 0, interval_s: float = 1.0) -> None:
        """Report metrics of one rank, one after the other."""
        first = self._counts.get(rank, 0)
        rows = [
            (self.now + place * interval_s, (first + place + 1) * interval_s, dict(given))
            for place, given in enumerate(metrics)
        ]
        self._counts[rank] = first + len(rows)
        self.frame(frames.REPORTS, {"first": first, "count": len(rows)}, rank=rank, rows=encode_rows(rows))

    def end(self, kind: str = "done", **data: Any) -> WrittenRun:
        """End the run; ``data`` is more of its outcome, such as the traceback of an error."""
        for rank in range(len(self._counts) if kind == "done" else 0):
            self.frame(frames.RANK_DONE, rank=rank)
        self.frame(frames.ATTEMPT_END, {"keep_rounds": None})
        self.event("run_end", kind=kind, message=data.get("message", ""))
        outcome = {
            "kind": kind,
            "message": "",
            "error_type": None,
            "rank": None,
            "ranks": [],
            "failures": 0,
            "node": "",
        }
        self.frame(frames.RUN_END, {**outcome, "followed": [], **data})
        self.frame(frames.RUN_CLOSED)
        return self.write()

    def write(self) -> WrittenRun:
        """Write what was recorded so far."""
        self._journal.flush()
        return self
