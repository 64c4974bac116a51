"""Limits so loose that only a mistake of another order passes them; `benchmarks/` measures how fast things are.

Each is the best of three, so that a machine with other things to do does not decide.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import raysgd
from support.runs import make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.slow, pytest.mark.shared_trainer]
travels_by_value(__name__)

TRIES = 3


def now() -> float:
    return time.time()


@pytest.fixture(scope="module")
def trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    """With its workers up, and torch in them."""
    with make_trainer(tmp_path_factory.mktemp("runs"), 2, "torch") as trainer:
        trainer.run(now, callbacks=quiet())
        yield trainer


def test_warm_workers_enter_train_func_soon(trainer: raysgd.Trainer) -> None:
    took_s = []
    for _ in range(TRIES):
        called = time.time()
        took_s.append(max(trainer.run(now, callbacks=quiet(), returns="all")) - called)
    assert min(took_s) < 3, took_s


def test_an_exception_gets_to_the_driver_soon(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        import torch
        import torch.distributed as dist

        if raysgd.world_rank() == 0:
            raise ValueError(time.time())
        dist.all_reduce(torch.ones(()))  # waits for rank 0

    took_s = []
    for _ in range(TRIES):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (what it says is looked at)
            trainer.run(train_func, callbacks=quiet())
        took_s.append(time.time() - caught.value.args[0])
    assert min(took_s) < 5, took_s


def test_a_report_costs_little(trainer: raysgd.Trainer) -> None:
    def train_func() -> float:
        start = time.perf_counter()
        for step in range(10_000):
            raysgd.report(step=step, loss=1 / (step + 1))
        return (time.perf_counter() - start) / 10_000

    took_s = [max(trainer.run(train_func, callbacks=quiet(), returns="all")) for _ in range(TRIES)]
    assert min(took_s) < 1e-3, took_s
