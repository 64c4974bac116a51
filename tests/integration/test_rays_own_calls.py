"""What train_func does with Ray by itself: tasks, actors, objects, and a process group's port that somebody else has."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from support.runs import are_gone, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.slow
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
    """Tasks that need CPUs beside its own, an actor, and an object of the driver's."""
    rank = raysgd.world_rank()
    squares = ray.get([square.remote(rank + i) for i in range(4)])
    counter = Counter.remote()  # type: ignore[attr-defined]
    totals = [ray.get(counter.add.remote(x)) for x in squares]
    raysgd.report(total=totals[-1])
    placement = ray.util.get_current_placement_group()
    return squares, ray.get(counter.pid.remote()), int(ray.get(config["rows"])[rank]), placement is None


def test_tasks_actors_and_objects(ray_cluster: Any, tmp_path: Path) -> None:
    """They are placed beside the workers, whose room holds the workers alone; and end with the run."""
    import numpy as np

    with make_trainer(tmp_path) as trainer:
        rows = ray.put(np.array([10, 20]))
        for _ in range(2):
            first, second = trainer.run(calls_ray, {"rows": rows}, callbacks=quiet(), returns="all")
            assert (first[0], second[0]) == ([0, 1, 4, 9], [1, 4, 9, 16])
            assert (first[2], second[2]) == (10, 20)
            assert are_gone([first[1], second[1]]), "the actors have outlived the run"


@ray.remote
class Shared:
    """An actor of the driver's, which all ranks talk to."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def add(self, rank: int) -> None:
        self.ranks.append(rank)

    def get(self) -> list[int]:
        return self.ranks


def talks_to(config: dict[str, Any]) -> None:
    ray.get(config["actor"].add.remote(raysgd.world_rank()))
    ray.get(ray.get_actor("shared of the test").add.remote(raysgd.world_rank()))


def test_an_actor_of_the_drivers(ray_cluster: Any, tmp_path: Path) -> None:
    actor = Shared.options(name="shared of the test").remote()  # type: ignore[attr-defined]
    try:
        with make_trainer(tmp_path) as trainer:
            trainer.run(talks_to, {"actor": actor}, callbacks=quiet())
        assert sorted(ray.get(actor.get.remote())) == [0, 0, 1, 1]
    finally:
        ray.kill(actor)


class Logger(raysgd.Callback):
    """A callback of the driver's that asks Ray."""

    runs_in = "driver"

    def __init__(self) -> None:
        self.squares: list[int] = []

    def on_result(self, result: Any) -> None:
        self.squares.append(ray.get(square.remote(result["step"])))


def reports(config: dict[str, Any]) -> None:
    for step in range(4):
        raysgd.report(step=step)


def test_a_callback_may_wait_for_ray(ray_cluster: Any, tmp_path: Path) -> None:
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


def test_a_port_of_the_users_environment_that_is_taken(ray_cluster: Any, tmp_path: Path) -> None:
    """As left behind by another launcher: raysgd forms its groups on ports that it has bound itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"env_vars": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}}
        with make_trainer(tmp_path, 2, "torch", runtime_env=environment) as trainer:
            for total, used in trainer.run(adds, {}, callbacks=quiet(), returns="all"):
                assert total == 2.0
                assert used != port
