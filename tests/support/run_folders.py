"""Folders of runs, written by hand as the journal writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raysgd.viewer.loaded_run import LoadedRun, load_run


class RunFolder:
    """A run's folder, written by hand as the journal writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seq = 0
        path.mkdir(parents=True)
        (path / "events.jsonl").touch()

    def line(self, file: str, **fields: Any) -> None:
        with open(self.path / file, "a") as stream:
            stream.write(json.dumps({"seq": self._seq, **fields}, separators=(",", ":")) + "\n")
        self._seq += 1

    def frame(self, kind: str, data: dict[str, Any] | None = None, *, attempt: int = 1, rank: int = -1) -> None:
        self.line("events.jsonl", attempt=attempt, kind=kind, rank=rank, data=data or {})

    def event(self, kind: str, /, **data: Any) -> None:
        self.line("events.jsonl", attempt=1, kind=kind, timestamp=100.0 + self._seq, data=data)

    def attempt(self, number: int = 1, world_size: int = 2, before: int = 0) -> None:
        data = {"attempt": number, "world_size": world_size, "iterations_before": before, "time_before_s": before}
        self.frame("attempt", data, attempt=number)

    def reports(
        self, rank: int, first: int, *metrics: dict[str, Any], attempt: int = 1, segment: int = 0, clock: float = 0.0
    ) -> None:
        rows = [[10.0 + clock + first + i, clock + first + i + 1.0, given] for i, given in enumerate(metrics)]
        fields = {"attempt": attempt, "rank": rank, "first": first, "count": len(rows), "rows": rows}
        text = json.dumps({"seq": self._seq, **fields}, separators=(",", ":"))
        with open(self.path / f"metrics-{segment:04d}.jsonl", "a") as stream:
            stream.write(text + "\n")
        self._seq += 1

    def describe(self, **fields: Any) -> None:
        (self.path / "run.json").write_text(json.dumps(fields))

    def load(self, **options: Any) -> LoadedRun:
        return load_run(self.path, **options)


def two_ranks(folder: RunFolder, *losses: float, factor: float = 1.0) -> RunFolder:
    """A run of two ranks; rank 1 has twice rank 0's loss."""
    folder.event("run_start", name="run_001", run_dir=str(folder.path))
    folder.attempt()
    for number, loss in enumerate(losses):
        for rank in (0, 1):
            folder.reports(rank, number, {"loss": loss * (rank + 1) * factor, "epoch": number})
    folder.frame("rank_done", rank=0)
    folder.frame("rank_done", rank=1)
    folder.frame("attempt_end", {"keep_rounds": None})
    folder.frame("run_end", {"kind": "done"})
    folder.event("run_end", kind="done", message="")
    folder.frame("run_closed")
    return folder
