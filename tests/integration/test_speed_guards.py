"""Loose limits that fail only on a slowdown by an order of magnitude; `benchmarks/` measures the speed.

Each is the best of three, so that a machine with other things to do does not decide.
"""

from __future__ import annotations

import time

import pytest

import raysgd
from support.runs import quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.alone]
travels_by_value(__name__)

TRIES = 3
TRAINER = {"backend": "torch"}


def now() -> float:
    return time.time()


@pytest.fixture(scope="module")
def warm_trainer(trainer: raysgd.Trainer) -> raysgd.Trainer:
    """A Trainer with started workers that have imported torch."""
    trainer.run(now, callbacks=quiet())
    return trainer


def test_warm_start_is_fast(warm_trainer: raysgd.Trainer) -> None:
    took_s = []
    for _ in range(TRIES):
        called = time.time()
        took_s.append(max(warm_trainer.run(now, callbacks=quiet(), returns="all")) - called)
    assert min(took_s) < 3, took_s


def test_exception_reaches_the_driver_fast(warm_trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        import torch
        import torch.distributed as dist

        if raysgd.world_rank() == 0:
            raise ValueError(time.time())
        dist.all_reduce(torch.ones(()))  # waits for rank 0

    took_s = []
    for _ in range(TRIES):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (what it says is looked at)
            warm_trainer.run(train_func, callbacks=quiet())
        took_s.append(time.time() - caught.value.args[0])
    assert min(took_s) < 5, took_s


def test_report_is_cheap(warm_trainer: raysgd.Trainer) -> None:
    def train_func() -> float:
        start = time.perf_counter()
        for step in range(10_000):
            raysgd.report(step=step, loss=1 / (step + 1))
        return (time.perf_counter() - start) / 10_000

    took_s = [max(warm_trainer.run(train_func, callbacks=quiet(), returns="all")) for _ in range(TRIES)]
    assert min(took_s) < 1e-3, took_s
