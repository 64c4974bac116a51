"""Spares: idle processes that are ready to replace dead workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import raysgd
from raysgd.errors import InfeasibleError
from support.poll import until
from support.runs import (
    PATIENCE_S,
    are_gone,
    events_of,
    make_trainer,
    once,
    pids,
    quiet,
    travels_by_value,
    wait_for_ready_spare,
)

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)


TRAINER = {"backend": "torch", "failure_config": raysgd.FailureConfig(max_failures=2, num_spares=1, abort_grace_s=20)}


def worker_pids() -> set[int]:
    """Return the process ids of all workers, including spares."""
    family = psutil.Process().children(recursive=True)
    return {process.pid for process in family if "ray::WorkerActor" in " ".join(_command(process))}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_for_spare(members: list[int], loaded: bool = True) -> int:
    """Wait for the only spare, and return its process id."""
    assert until(lambda: len(worker_pids() - set(members)) == 1, PATIENCE_S)
    (spare,) = worker_pids() - set(members)
    if loaded:  # the spare has imported torch
        assert until(lambda: "libtorch_cpu" in Path(f"/proc/{spare}/maps").read_text(), PATIENCE_S)
    return wait_for_ready_spare(members)


def reduce_and_die_once(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    state = raysgd.load_checkpoint()
    start = 0 if state is None else state["step"] + 1
    for step in range(start, 4):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == raysgd.world_size()
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
        if step == 1 and raysgd.world_rank() == config["rank"]:
            while (saved := raysgd.load_checkpoint()) is None or saved["step"] < 1:
                time.sleep(0.01)
            if once(config["folder"], "died"):
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
    return {"pid": os.getpid(), "start": start}


@pytest.mark.parametrize("rank", [0, 1])
def test_spare_replaces_a_dead_worker_and_another_spare_starts(
    trainer: raysgd.Trainer, tmp_path: Path, rank: int
) -> None:
    before = pids(trainer)
    spare = wait_for_spare(before)
    returned = trainer.run(
        reduce_and_die_once, {"folder": str(tmp_path), "rank": rank}, callbacks=quiet(), returns="all"
    )
    assert [value["start"] for value in returned] == [2, 2]
    after = [value["pid"] for value in returned]
    assert after[rank] == spare and after[1 - rank] == before[1 - rank]
    assert wait_for_spare(after) not in {*before, spare}
    assert len(events_of(trainer, "failure")) == 1


def import_and_die_once(config: dict[str, Any]) -> bool:
    was_imported = "sqlite3" in sys.modules
    import sqlite3  # noqa: F401

    if raysgd.world_rank() == 1 and once(config["folder"], "died"):
        while "_sqlite3" not in Path(f"/proc/{config['spare']}/maps").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return was_imported


def test_spare_has_imported_what_the_ranks_have(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    config = {"folder": str(tmp_path), "spare": wait_for_spare(pids(trainer))}
    _, was_imported = trainer.run(import_and_die_once, config, callbacks=quiet(), returns="all")
    assert was_imported


def test_dead_spare_is_skipped(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    before = pids(trainer)
    spare = wait_for_spare(before)
    os.kill(spare, signal.SIGKILL)
    assert are_gone([spare])
    returned = trainer.run(reduce_and_die_once, {"folder": str(tmp_path), "rank": 1}, callbacks=quiet(), returns="all")
    assert returned[0]["pid"] == before[0] and returned[1]["pid"] not in {*before, spare}
    assert len(events_of(trainer, "failure")) == 1, "the spare's death was counted"


def test_hung_spare_is_skipped(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    before = pids(trainer)
    spare = wait_for_spare(before)
    os.kill(spare, signal.SIGSTOP)
    returned = trainer.run(reduce_and_die_once, {"folder": str(tmp_path), "rank": 0}, callbacks=quiet(), returns="all")
    assert returned[1]["pid"] == before[1] and returned[0]["pid"] not in {*before, spare}
    assert are_gone([spare])
    wait_for_spare([value["pid"] for value in returned])


def test_run_does_not_wait_for_spares(ray_cluster: Any, tmp_path: Path) -> None:
    """Three of the eight CPUs of the module are taken; two workers and three spares fit."""
    with make_trainer(tmp_path, 2, failure_config=raysgd.FailureConfig(num_spares=3)) as trainer:
        members = pids(trainer)
        assert until(lambda: len(worker_pids()) == 3 + 5, PATIENCE_S)
        everyone = worker_pids()
    assert set(members) < everyone
    assert until(lambda: len(worker_pids()) == 3, 20), "spares outlived their Trainer"


def test_spares_that_do_not_fit_are_refused_with_the_arithmetic(ray_cluster: Any, tmp_path: Path) -> None:
    with (
        make_trainer(tmp_path, 2, cpus_per_worker=2, failure_config=raysgd.FailureConfig(num_spares=3)) as trainer,
        pytest.raises(InfeasibleError, match=r"needs 5 x 2 CPU = 10 \(2 workers, 3 spare\), the cluster has 8"),
    ):
        trainer.run(os.getpid, callbacks=quiet())


def test_spare_has_the_runtime_env_of_the_workers(ray_cluster: Any, tmp_path: Path) -> None:
    settings = {"runtime_env": {"env_vars": {"SHADE": "green"}}, "failure_config": raysgd.FailureConfig(num_spares=1)}

    def shade(config: dict[str, Any]) -> str:
        if raysgd.world_rank() == 0 and once(config["folder"], "died"):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return os.environ["SHADE"]

    with make_trainer(tmp_path / "runs", 1, **settings) as trainer:
        assert trainer.run(shade, {"folder": str(tmp_path)}, callbacks=quiet()) == "green"


@pytest.mark.parametrize(("num_workers", "workers_per_replica"), [((1, 2), 1), ((2, 4), 2)], ids=str)
def test_spare_replaces_a_dead_worker_of_an_elastic_group_at_its_largest_size(
    ray_cluster: Any, tmp_path: Path, num_workers: tuple[int, int], workers_per_replica: int
) -> None:
    def die_once(config: dict[str, Any]) -> int:
        if raysgd.world_rank() == 1 and once(config["folder"], "died"):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return os.getpid()

    failure = raysgd.FailureConfig(num_spares=1, abort_grace_s=20)
    others = worker_pids()
    with make_trainer(
        tmp_path / "runs", num_workers, workers_per_replica=workers_per_replica, failure_config=failure
    ) as trainer:
        before = pids(trainer)
        assert len(before) == num_workers[1]
        spare = wait_for_spare([*before, *others], loaded=False)
        after = trainer.run(die_once, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        assert after == [before[0], spare, *before[2:]]
        assert events_of(trainer, "resize") == []
        assert wait_for_spare([*after, *others], loaded=False) not in before
