"""The environment of training: Ray tasks, actors and objects, child processes, a taken port, a clock jump."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.testing import check_history
from support.runs import are_gone, make_trainer, quiet, travels_by_value

travels_by_value(__name__)


@ray.remote(num_cpus=1)
def square(x: int) -> int:
    return x * x


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    def pid(self) -> int:
        return os.getpid()


def calls_ray(config: dict[str, Any]) -> tuple[list[int], int, int, bool]:
    """Use tasks that need additional CPUs, an actor, and an object of the driver."""
    rank = raysgd.world_rank()
    squares = ray.get([square.remote(rank + i) for i in range(4)])
    counter = Counter.remote()  # type: ignore[attr-defined]
    totals = [ray.get(counter.add.remote(x)) for x in squares]
    raysgd.report(total=totals[-1])
    placement = ray.util.get_current_placement_group()
    return squares, ray.get(counter.pid.remote()), int(ray.get(config["rows"])[rank]), placement is None


def test_train_func_can_use_ray_tasks_actors_and_objects(ray_cluster: Any, tmp_path: Path) -> None:
    """Tasks and actors run outside the placement group of the workers, and end with the run."""
    import numpy as np

    with make_trainer(tmp_path) as trainer:
        rows = ray.put(np.array([10, 20]))
        for _ in range(2):
            first, second = trainer.run(calls_ray, {"rows": rows}, callbacks=quiet(), returns="all")
            assert (first[0], second[0]) == ([0, 1, 4, 9], [1, 4, 9, 16])
            assert (first[2], second[2]) == (10, 20)
            assert are_gone([first[1], second[1]]), "the actors have outlived the run"


def test_object_references_are_allowed_in_train_func_and_its_return_value(ray_cluster: Any, tmp_path: Path) -> None:
    captured = ray.put([1, 2])

    def train_func() -> Any:
        return {"made": ray.put([*ray.get(captured), 3]), "given": captured}

    with make_trainer(tmp_path) as trainer:
        returned = trainer.run(train_func, callbacks=quiet())
        assert ray.get(returned["made"]) == [1, 2, 3]
        assert ray.get(returned["given"]) == [1, 2]


@ray.remote
class Shared:
    """An actor of the driver that all ranks call."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def add(self, rank: int) -> None:
        self.ranks.append(rank)

    def get(self) -> list[int]:
        return self.ranks


def call_actor(config: dict[str, Any]) -> None:
    ray.get(config["actor"].add.remote(raysgd.world_rank()))
    ray.get(ray.get_actor("shared of the test").add.remote(raysgd.world_rank()))


def test_actor_of_the_driver_is_usable_in_train_func(ray_cluster: Any, tmp_path: Path) -> None:
    actor = Shared.options(name="shared of the test").remote()  # type: ignore[attr-defined]
    try:
        with make_trainer(tmp_path) as trainer:
            trainer.run(call_actor, {"actor": actor}, callbacks=quiet())
        assert sorted(ray.get(actor.get.remote())) == [0, 0, 1, 1]
    finally:
        ray.kill(actor)


class Logger(raysgd.Callback):
    """A driver callback that calls Ray."""

    runs_in = "driver"

    def __init__(self) -> None:
        self.squares: list[int] = []

    def on_result(self, result: Any) -> None:
        self.squares.append(ray.get(square.remote(result["step"])))


def reports(config: dict[str, Any]) -> None:
    for step in range(4):
        raysgd.report(step=step)


def test_callback_may_wait_for_ray(ray_cluster: Any, tmp_path: Path) -> None:
    logger = Logger()
    with make_trainer(tmp_path) as trainer:
        trainer.run(reports, {}, callbacks=[logger])
    assert logger.squares == [0, 1, 4, 9]


def adds(config: dict[str, Any]) -> tuple[float, str]:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total), os.environ["MASTER_PORT"]


def test_taken_master_port_of_the_environment_is_ignored(ray_cluster: Any, tmp_path: Path) -> None:
    """Another launcher may have set the port: raysgd forms its groups on ports that it bound itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"env_vars": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}}
        with make_trainer(tmp_path, 2, "torch", runtime_env=environment) as trainer:
            for total, used in trainer.run(adds, {}, callbacks=quiet(), returns="all"):
                assert total == 2.0
                assert used != port


def reads_in_processes(config: dict[str, Any]) -> tuple[list[int], set[int]]:
    """Use two DataLoader workers per rank, forked from a process with threads of Ray and gloo."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[tuple[int, int]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[int, int]:
            return index, os.getpid()

    seen, readers = [], set()
    loader = raysgd.torch.prepare_data_loader(DataLoader(Rows(), batch_size=8, num_workers=2, shuffle=True))
    model = raysgd.torch.prepare_model(torch.nn.Linear(1, 1))
    for epoch in range(2):
        for rows, pids in loader:
            model(rows.float()[:, None]).sum().backward()
            seen += rows.tolist() if epoch else []
            readers |= set(pids.tolist())
        raysgd.report(epoch=epoch)
    return seen, readers


def test_data_loader_may_have_worker_processes(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, "torch") as trainer:
        for _ in range(2):
            (first, readers), (second, others) = trainer.run(reads_in_processes, {}, callbacks=quiet(), returns="all")
            assert sorted(first + second) == list(range(64))
            assert len(readers) == len(others) == 4  # two per epoch
            assert are_gone([*readers, *others])


def set_clock(config: dict[str, Any]) -> None:
    real = time.time
    try:
        for step in range(6):
            raysgd.report(step=step)
            raysgd.save_checkpoint({"step": step})
            if step == 2:
                time.time = lambda: real() + config["jump_s"]
    finally:
        time.time = real


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_wall_clock_jump_has_no_effect(ray_cluster: Any, tmp_path: Path, jump_s: int) -> None:
    """A time server may set the clock: raysgd measures durations and timeouts with the monotonic clock."""
    with make_trainer(tmp_path) as trainer:
        results = list(trainer.run_generator(set_clock, {"jump_s": jump_s}, callbacks=quiet()))
        times = [result["time_total_s"] for result in results]
        assert times == sorted(times) and times[-1] < 60
        assert abs(results[-1]["timestamp"] - results[0]["timestamp"]) > 80_000, "the clock was not set"
        assert len(results) == 6
        check_history(str(trainer.run_dir))
