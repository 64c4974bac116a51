"""The history that the files of a simulated run would have: the commands of its machine, and what `Run` adds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.storage.names import FileEntry
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.checkpoints.pending import find_rounds
from raysgd.controller.frames import Frame
from raysgd.controller.journal.outcome import outcome_data
from raysgd.controller.run_plan import PreviousState, build_previous_state
from raysgd.testing.record import History, Stored
from support.simulation.stepping import SimulatedRun


def history_of(
    run: SimulatedRun,
    *,
    max_failures: int | None = None,
    within_s: float | None = None,
    on_storage: Iterable[Manifest] | None = None,
) -> History:
    """Return the history that `raysgd.testing.check_history` would read from the files of a simulated run.

    Args:
        run: The run.
        max_failures: As for `check_history`.
        within_s: As for `check_history`.
        on_storage: The checkpoints on storage; by default those that the run has committed.
    """
    made = tuple(replace(frame, seq=seq) for seq, frame in enumerate(_frames(run)))
    stored = _committed(run) if on_storage is None else on_storage
    found = {manifest.number: Stored(_with_files(manifest)) for manifest in stored}
    return History(made, found, max_failures, within_s)


def _frames(run: SimulatedRun) -> Iterator[Frame]:  # noqa: C901  (a dispatch: a line or two a case)
    pids: defaultdict[int, int] = defaultdict(
        itertools.count(100).__next__
    )  # a rank whose process died gets another one
    attempt = 0
    yield _event("run_start", 0, {"name": "run_001", "run_dir": "/run"})
    for command in run.commands:
        match command:
            case c.EmitFrame():
                if command.kind == frames.ATTEMPT:
                    for rank in range(command.data["world_size"]):
                        yield _event("worker_up", attempt, {"rank": rank, "node": "node0", "pid": pids[rank]})
                    attempt = command.attempt
                yield Frame(0, command.kind, command.attempt, command.rank, command.data, command.rows)
            case c.RecordEvent():
                yield _event(command.kind, attempt, command.data)
                for rank in command.data["ranks"] if command.kind == "failure" else ():
                    pids.pop(rank, None)
                if command.kind in ("controller_restart", "paused"):
                    pids.clear()
            case c.KillWorkers():
                for rank in command.ranks:
                    pids.pop(rank, None)
            case c.PublishOutcome():
                outcome = command.outcome
                data = {key: value for key, value in outcome_data(outcome).items() if not isinstance(value, bytes)}
                yield _event("run_end", attempt, {"kind": outcome.kind, "message": outcome.describe()})
                yield Frame(0, frames.RUN_END, attempt, data=data)
            case c.CloseRun():
                yield Frame(0, frames.RUN_CLOSED, attempt)


def _event(kind: str, attempt: int, data: dict[str, Any]) -> Frame:
    return Frame(0, frames.EVENT, attempt, data={"kind": kind, "timestamp": 0.0, "data": data})


def _committed(run: SimulatedRun) -> list[Manifest]:
    committed = [frame.data["number"] for frame in run.emitted(frames.CHECKPOINT)]
    deleted = {command.number for command in run.all_of(c.DeleteCheckpoint)}
    written = (each.manifest for each in run.commands if isinstance(each, (c.CommitCheckpoint, c.WriteRound)))
    manifests = {manifest.number: manifest for manifest in written}
    return [manifests[number] for number in committed if number not in deleted]


def _with_files(manifest: Manifest) -> Manifest:
    """Return the manifest with a file for each part, because simulated parts have none."""
    ranks = range(manifest.world_size) if manifest.all_ranks else range(1)
    return replace(manifest, parts={rank: [FileEntry(f"r{rank}", 10, 1)] for rank in ranks})


def previous_state_of(run: SimulatedRun, on_storage: Iterable[Manifest] | None = None) -> PreviousState:
    """Return what a restarted controller would read of the run.

    Args:
        run: The run until now.
        on_storage: The manifests on storage; by default those of the committed checkpoints.
    """
    history = history_of(run, on_storage=on_storage)
    journal = [frame for frame in history.frames if frame.kind != frames.REPORTS]
    known = [stored.manifest for stored in history.stored.values() if stored.manifest is not None]
    manifests = find_rounds(sorted(known, key=lambda manifest: manifest.number), history.frames, {})
    return build_previous_state(
        journal, history.frames[-1].seq, manifests, max((m.number for m in manifests), default=0)
    )
