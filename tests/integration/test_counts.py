"""What a run costs in things that can be counted: processes, messages, bytes, copies and imports. No test measures time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raysgd
from support.runs import HostLog, actor_pids, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)

TRAINER = {"backend": "torch"}


def count_messages(work: Callable[[], Any]) -> tuple[int, int]:
    """Return how many messages this worker's events needed until now and while ``work`` runs, and their bytes."""
    from raysgd.workers import events_connection

    pack, sizes = events_connection.pack, []

    def counting(message: Any) -> bytes:
        packed = pack(message)
        sizes.append(len(packed))
        return packed

    events_connection.pack = counting
    try:
        work()
        time.sleep(0.5)  # the events are sent by another thread
    finally:
        events_connection.pack = pack
    return len(sizes), sum(sizes)


def report_slowly(config: dict[str, Any]) -> tuple[int, int]:
    def work() -> None:
        for step in range(config["reports"]):
            raysgd.report(step=step, loss=1 / (step + 1))
            if config["pause_s"]:
                time.sleep(config["pause_s"])

    return count_messages(work)


def test_report_that_is_alone_is_one_message(trainer: raysgd.Trainer) -> None:
    for messages, size in trainer.run(report_slowly, {"reports": 10, "pause_s": 0.1}, callbacks=quiet(), returns="all"):
        assert 0 < messages <= 14, "ten for the reports; entering and a sample"
        assert size <= 14 * 600


def test_reports_that_come_fast_share_messages(trainer: raysgd.Trainer) -> None:
    for messages, size in trainer.run(report_slowly, {"reports": 5000, "pause_s": 0}, callbacks=quiet(), returns="all"):
        assert 0 < messages <= 200
        assert size / 5000 <= 100, "a report of two numbers, in bytes"


def test_save_copies_each_byte_once_into_two_buffers(trainer: raysgd.Trainer) -> None:
    def train_func() -> tuple[int, int, int]:
        import numpy as np
        import torch

        from raysgd.checkpoint import snapshot

        copied, buffers = 0, set()
        copyto, make = np.copyto, snapshot.StagingPool.acquire

        def counting(target: Any, source: Any, **options: Any) -> None:
            nonlocal copied
            copied += target.nbytes
            copyto(target, source, **options)

        def noting(pool: Any, *args: Any, **options: Any) -> Any:
            buffer = make(pool, *args, **options)
            buffers.add(buffer.view.__array_interface__["data"][0])
            return buffer

        np.copyto, snapshot.StagingPool.acquire = counting, noting
        state = {"weights": torch.ones(1 << 20), "moments": [torch.ones(1 << 18), torch.ones(1 << 18)]}
        try:
            for _ in range(6):
                raysgd.save_checkpoint(state)
                time.sleep(0.1)
        finally:
            np.copyto, snapshot.StagingPool.acquire = copyto, make
        return copied, len(buffers), raysgd.world_rank()

    for copied, num_buffers, rank in trainer.run(train_func, callbacks=quiet(), returns="all"):
        expected = 6 * 4 * ((1 << 20) + (1 << 19)) if rank == 0 else 0
        assert expected <= copied <= expected + 6 * 65536, "the rest are generators"
        assert num_buffers <= 2


def test_trainer_has_few_processes(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    log = HostLog(tmp_path / "log", "training_iteration")

    def train_func() -> None:
        raysgd.report(loss=1.0)

    trainer.run(train_func, callbacks=[*quiet(), log])
    found = {
        kind: len(actor_pids(kind))
        for kind in ("TrainerActor", "WorkerActor", "CallbackHost", "NodeAgent", "ControllerGuard")
    }
    assert found == {"TrainerActor": 1, "WorkerActor": 2, "CallbackHost": 1, "NodeAgent": 0, "ControllerGuard": 0}
