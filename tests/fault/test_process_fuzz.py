"""Kills and stops all processes of a run at random times: every row and every report counts once, and the run ends soon after.

``RAYSGD_FUZZ_SEED`` repeats a choice of faults, and ``RAYSGD_FUZZ_S`` sets for how many seconds faults happen.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

import raysgd
from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller.journal.journal import stored_frames
from raysgd.session import context
from raysgd.testing import check_history
from support.poll import until
from support.row_log import attempt_starts, rows_that_count
from support.runs import PATIENCE_S, HostLog, actor_pids, events_of, quiet, travels_by_value

FUZZ_S = float(os.environ.get("RAYSGD_FUZZ_S", 15))
SEED = int(os.environ.get("RAYSGD_FUZZ_SEED", random.randrange(10**6)))

pytestmark = [pytest.mark.fault, pytest.mark.timeout(FUZZ_S + 240)]
travels_by_value(__name__)

HEARTBEAT_S = 2.0
NUM_ROWS = 101
#: The numbers of CPUs of the nodes; Ray Data needs those that the workers leave.
NODES = (3, 3)
#: The classes of the processes, and how often each is chosen among those that exist.
KINDS = {
    "WorkerActor": 5,
    "TrainerActor": 2,
    "CallbackHost": 1,
    "ControllerGuard": 1,
    "NodeAgent": 2,
    "StreamActor": 2,
    "DataHolder": 1,
    "CoordinatorActor": 2,
}
ACTIONS = ["kill", "stop", "pause"]
#: The run that needs the data ends with this process.
ONLY_PAUSED = "DataHolder"


def train_epochs(config: dict[str, Any]) -> int:
    """Train whole epochs, at least one, until a file exists; save in every step, and write each row to a file."""
    state = raysgd.load_checkpoint()
    step = first = 0 if state is None else state["step"]
    session = context.installed()
    shard = raysgd.get_dataset().get_split()
    with open(Path(config["folder"], f"{session.attempt}-{first}-{raysgd.world_rank()}"), "a") as log:
        is_whole = first == 0  # no epoch is to be completed
        while not (step and is_whole and raysgd.broadcast(os.path.exists(config["file"]))):
            is_whole = True
            for batch in shard.iter_batches(batch_size=4, shuffle=config["shuffle"]):
                step += 1
                log.writelines(f"{step} {shard.epoch} {row}\n" for row in batch["id"].tolist())
                log.flush()
                if not config["saves_first"]:
                    raysgd.report(step=step)
                raysgd.save_checkpoint({"step": step})
                time.sleep(config["pause_s"])
                if config["saves_first"]:
                    raysgd.report(step=step)
                time.sleep(0.05)
    return step


def check_reports(run_dir: str, starts: dict[int, int]) -> None:
    """Check that `load_run` has each report once that is on storage, without those that a later attempt made again."""
    metrics = raysgd.load_run(run_dir).metrics
    assert metrics["training_iteration"].tolist() == list(range(1, len(metrics) + 1))
    steps = metrics["step"].tolist()
    assert steps == sorted(set(steps)), "a step was reported twice"
    needed: set[int] = set()
    for frame in stored_frames(Storage.from_uri(run_dir)):
        if frame.kind == "reports":
            until = min((first for attempt, first in starts.items() if attempt > frame.attempt), default=float("inf"))
            needed |= {step for row in json.loads(frame.rows) if (step := row[2]["step"]) <= until}
    assert not (lost := needed - set(steps)), f"the reports of steps {sorted(lost)} are lost\n{frames_around(run_dir)}"


def faults(choice: random.Random) -> Iterator[str]:
    """Kill or stop a process again and again; yield what was done."""
    end = time.monotonic() + FUZZ_S
    while time.monotonic() < end:
        time.sleep(choice.choice([0.1, 1.0, 3.0, 8.0]) * choice.random())
        found = {kind: sorted(pids) for kind in KINDS if (pids := actor_pids(kind))}
        if not found:
            continue
        (kind,) = choice.choices(list(found), [KINDS[kind] for kind in found])
        action, pause_s = choice.choice(ACTIONS), choice.random() * HEARTBEAT_S
        if kind == ONLY_PAUSED:
            action, pause_s = "pause", pause_s / 4
        pid = choice.choice(found[kind])
        yield f"{time.strftime('%X')} {action} {kind} {pid}"
        try:
            os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
            if action == "pause":
                time.sleep(pause_s)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def read(stream: raysgd.ResultStream, results: list[raysgd.Result]) -> None:
    with contextlib.suppress(Exception):  # `get_returns` raises it as well
        for result in stream:
            results.append(result)


def frames_around(run_dir: Any) -> str:
    """Return the frames of a run that are not reports, to find out what a reader may have missed."""
    found = [frame for frame in stored_frames(Storage.from_uri(str(run_dir))) if frame.kind != "reports"]
    return "\n".join(f"{frame.seq} {frame.kind} {frame.attempt} {str(frame.data)[:200]}" for frame in found)


def stopped_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.status() == psutil.STATUS_STOPPED else []
    return found


@pytest.mark.parametrize(
    "kind", ["attached", "detached", "lazy", "saves first", pytest.param("coordinated", marks=pytest.mark.jax)]
)
def test_each_row_counts_once_whatever_is_killed_or_stopped(cluster: Any, tmp_path: Path, kind: str) -> None:
    print(f"RAYSGD_FUZZ_SEED={SEED}")
    choice, is_lazy, saves_first = random.Random(f"{SEED} {kind}"), kind == "lazy", kind == "saves first"
    folder, log = tmp_path / "rows", tmp_path / "log"
    folder.mkdir()
    run = raysgd.RunConfig(name=f"fuzz{SEED}", storage_path=tmp_path / "runs", detached=kind == "detached")
    failure = raysgd.FailureConfig(max_failures=-1, heartbeat_timeout_s=HEARTBEAT_S, callback_timeout_s=20)
    backend = "jax" if kind == "coordinated" else "none"
    with raysgd.Trainer((1, 3), backend, seed=5, run_config=run, failure_config=failure) as trainer:
        config = {"folder": str(folder), "file": str(tmp_path / "go"), "shuffle": "window" if is_lazy else "full"}
        config |= {"saves_first": saves_first, "pause_s": 0.02 * saves_first}
        stream = trainer.run_generator(
            train_epochs,
            config,
            dataset=ray.data.range(NUM_ROWS, override_num_blocks=4) if is_lazy else {"id": np.arange(NUM_ROWS)},
            callbacks=[*quiet(), HostLog(log, "training_iteration")],
        )
        results: list[raysgd.Result] = []
        reader = threading.Thread(target=read, args=(stream, results), name="test-reader")
        reader.start()
        assert until(lambda: results, PATIENCE_S)
        for fault in faults(choice):
            print(fault, len(results))
        (tmp_path / "go").touch()
        print(time.strftime("%X"), "the last fault was before")
        reader.join(2 * PATIENCE_S)
        assert not reader.is_alive(), f"no end: {trainer.status()}"
        num_steps = stream.get_returns()
        check_history(str(trainer.run_dir))
        warnings = [warning["message"] for warning in events_of(trainer, "warning")]
        trainer.shutdown()
    for before, after in itertools.pairwise(results):
        follows = after["training_iteration"] == before["training_iteration"] + 1
        assert follows or after["attempt"] > before["attempt"]
    check_reports(str(trainer.run_dir), attempt_starts(folder))
    # A rank of a loop that saves first may die between the save and its report, which is never made then.
    num_rounds = len(raysgd.load_run(trainer.run_dir).metrics)
    assert num_rounds == num_steps or (saves_first and num_rounds < num_steps)
    lost = set(range(1, num_rounds + 1)) - {result["training_iteration"] for result in results}
    assert not lost, f"of {num_rounds} rounds, the iteration lacks {sorted(lost)}\n{frames_around(trainer.run_dir)}"
    seen = rows_that_count(folder)
    num_epochs = 1 + max(epoch for epoch, _ in seen)
    assert seen == Counter({(epoch, row): 1 for epoch in range(num_epochs) for row in range(NUM_ROWS)})
    if not any("gets no further calls" in warning or "was killed, because" in warning for warning in warnings):
        logged = {json.loads(line)[0] for line in log.read_text().splitlines() if line.endswith("]")}
        lost = set(range(1, num_rounds + 1)) - logged
        assert not lost, f"of {num_rounds} rounds, the callback lacks {sorted(lost)}\n{frames_around(trainer.run_dir)}"
    assert until(lambda: not stopped_processes(), PATIENCE_S), stopped_processes()
