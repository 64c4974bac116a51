"""The history of a simulated run, as its files would have it: what the machine commanded, and what `Run` adds to that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from raysgd.checkpoint.manifest import FileEntry, Manifest
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.outcome import outcome_data
from raysgd.testing.record import History, Stored
from raysgd.testing.simulation.stepping import SimulatedRun

NODE = "node0"


class _Processes:
    """The process of each rank: another one after it died."""

    def __init__(self) -> None:
        self._next = itertools.count(100)
        self._pids: dict[int, int] = {}

    def of(self, rank: int) -> int:
        return self._pids.setdefault(rank, next(self._next))

    def lose_all(self) -> None:
        self._pids.clear()

    def lose(self, rank: int) -> None:
        self._pids.pop(rank, None)


def history_of(run: SimulatedRun, *, max_failures: int | None = None, within_s: float | None = None) -> History:
    """What `check_history` would read of a run whose machine was stepped by hand."""
    made = tuple(replace(frame, seq=seq) for seq, frame in enumerate(_frames(run)))
    return History(made, _stored(run), max_failures, within_s)


def _frames(run: SimulatedRun) -> Iterator[Frame]:  # noqa: C901  (a dispatch: a line or two a case)
    processes, attempt = _Processes(), 0
    yield _event("run_start", 0, {"name": "run_001", "run_dir": "/run"})
    for command in run.told:
        match command:
            case c.Say():
                if command.kind == frames.ATTEMPT:
                    for rank in range(command.data["world_size"]):
                        up = {"rank": rank, "node": NODE, "pid": processes.of(rank)}
                        yield _event("worker_up", attempt, up)
                    attempt = command.attempt
                yield Frame(0, command.kind, command.attempt, command.rank, command.data, command.rows)
            case c.Note():
                yield _event(command.kind, attempt, command.data)
                for rank in command.data["ranks"] if command.kind == "failure" else ():
                    processes.lose(rank)
                if command.kind in ("controller_restart", "paused"):
                    processes.lose_all()
            case c.KillRanks():
                for rank in command.ranks:
                    processes.lose(rank)
            case c.TellOutcome():
                outcome = command.outcome
                data = {key: value for key, value in outcome_data(outcome).items() if not isinstance(value, bytes)}
                yield Frame(0, frames.RUN_END, attempt, data=data)
                failed = outcome.failed
                message = outcome.message if failed is None else f"rank {outcome.rank}: {failed.summary}"
                yield _event("run_end", attempt, {"kind": outcome.kind, "message": message})
            case c.Close():
                yield Frame(0, frames.RUN_CLOSED, attempt)


def _event(kind: str, attempt: int, data: dict[str, Any]) -> Frame:
    return Frame(0, frames.EVENT, attempt, data={"kind": kind, "timestamp": 0.0, "data": data})


def _stored(run: SimulatedRun) -> dict[int, Stored]:
    told = [say.data["number"] for say in run.said(frames.CHECKPOINT)]
    deleted = {command.number for command in run.all_of(c.DeleteCheckpoint)}
    manifests = {commit.manifest.number: commit.manifest for commit in run.all_of(c.Commit)}
    return {number: Stored(_with_files(manifests[number])) for number in told if number not in deleted}


def _with_files(manifest: Manifest) -> Manifest:
    """Simulated parts have no files."""
    ranks = range(manifest.world_size) if manifest.all_ranks else range(1)
    return replace(manifest, parts={rank: [FileEntry(f"r{rank}", 10, 1)] for rank in ranks})
