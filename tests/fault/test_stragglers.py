"""Ranks that are slower than the others: the run continues and reports them as stragglers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.result import Event
from support.runs import events_of, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault, pytest.mark.timeout(240)]
travels_by_value(__name__)

SLOW_RANK = 1
#: Far above what a step of the others takes, on a loaded machine too.
SLOW_S = 0.2
PATIENCE_S = 60.0
MAX_STEPS = round(PATIENCE_S / SLOW_S)
BATCH_SIZE = 2


TRAINER: dict[str, Any] = {
    "num_workers": 3,
    "backend": "torch",
    "failure_config": raysgd.FailureConfig(max_failures=0),
}


class StopAtStraggler(raysgd.Callback):
    """Stops the run at its first straggler."""

    def on_event(self, event: Event) -> None:
        if event.kind == "straggler":
            raise raysgd.Stop("found")


class Numbers:
    """A map-style dataset whose items are slow on one rank."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> Any:
        import torch

        if raysgd.world_rank() == SLOW_RANK:
            time.sleep(SLOW_S / BATCH_SIZE)
        return torch.full((4,), float(index))


def is_slow() -> bool:
    return raysgd.world_rank() == SLOW_RANK


def net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def loss_of(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


# -- waiting in the gradient reduction ---------------------------------------------------------------------------------


def slow_compute(config: dict[str, Any]) -> None:
    import torch

    model = raysgd.torch.prepare_model(net())
    for step in range(MAX_STEPS):
        if raysgd.should_stop():
            return
        if is_slow():
            time.sleep(SLOW_S)
        loss_of(model, torch.ones(BATCH_SIZE, 4)).backward()
        raysgd.report(step=step)


def slow_dataset(config: dict[str, Any]) -> None:
    model = raysgd.torch.prepare_model(net())
    for batch in raysgd.get_dataset().get_split().to_torch(BATCH_SIZE):
        if raysgd.should_stop():
            return
        loss_of(model, batch).backward()


def slow_loader(config: dict[str, Any]) -> None:
    from torch.utils.data import DataLoader

    model = raysgd.torch.prepare_model(net())
    dataset: Any = Numbers()
    for batch in raysgd.torch.prepare_data_loader(DataLoader(dataset, batch_size=BATCH_SIZE, drop_last=True)):
        if raysgd.should_stop():
            return
        loss_of(model, batch).backward()


def check_reported_once(trainer: raysgd.Trainer, cause: str) -> None:
    (straggler,) = events_of(trainer, "straggler")
    assert (straggler["rank"], straggler["cause"]) == (SLOW_RANK, cause)
    assert straggler["gain"] > 1.5
    (warning,) = [event for event in events_of(trainer, "warning") if f"rank {SLOW_RANK} on " in event["message"]]
    assert warning["message"].startswith(straggler["text"])
    assert f"rank {SLOW_RANK} on {straggler['node']} " in straggler["text"]
    assert events_of(trainer, "failure") == [] and events_of(trainer, "hang") == []


@pytest.mark.parametrize(
    ("train_func", "cause"),
    [(slow_compute, "straggler"), (slow_dataset, "data"), (slow_loader, "data")],
    ids=["compute", "dataset", "loader"],
)
def test_straggler_that_others_wait_for_is_named(trainer: raysgd.Trainer, train_func: Any, cause: str) -> None:
    data = Numbers() if train_func is slow_dataset else None
    trainer.run(train_func, {}, dataset=data, callbacks=[*quiet(), StopAtStraggler()])
    check_reported_once(trainer, cause)


def test_straggler_is_named_with_deterministic_reduction(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, **TRAINER, deterministic=True, seed=0) as trainer:
        trainer.run(slow_compute, {}, callbacks=[*quiet(), StopAtStraggler()])
        check_reported_once(trainer, "straggler")


# -- invisible waiting, and no waiting ---------------------------------------------------------------------------------


def own_wrapper(config: dict[str, Any]) -> None:
    """Train with the user's own DistributedDataParallel: first computing is slow, then reading."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net())
    for step in range(config["num_unseen"]):
        if is_slow():
            time.sleep(SLOW_S)
        loss_of(model, torch.ones(BATCH_SIZE, 4)).backward()
        raysgd.report(step=step)
    raysgd.report(step=-1)
    slow_batches = raysgd.get_dataset().get_split().to_torch(BATCH_SIZE)
    for batch in slow_batches:
        if raysgd.should_stop():
            return
        loss_of(model, batch).backward()
        raysgd.report(step=-2)


class Moments(raysgd.Callback):
    """Records when reading became slow."""

    began: float | None = None

    def on_result(self, result: raysgd.Result) -> None:
        if result["step"] == -1:
            self.began = result["timestamp"]


def test_without_visible_waiting_only_slow_data_is_reported(trainer: raysgd.Trainer) -> None:
    moments = Moments()
    # Four windows of 20 steps, and part of a fifth: with visible waiting, three windows are enough.
    trainer.run(own_wrapper, {"num_unseen": 100}, dataset=Numbers(), callbacks=[*quiet(), moments, StopAtStraggler()])
    check_reported_once(trainer, "data")
    events = raysgd.load_run(str(trainer.run_dir)).events
    (reported_at,) = events[events["kind"] == "straggler"]["timestamp"]
    assert moments.began is not None and reported_at > moments.began


def test_independent_ranks_are_compared_by_step_time(ray_cluster: Any, tmp_path: Path) -> None:
    reported = tmp_path / "reported"

    class CreateFileAtStraggler(raysgd.Callback):
        def on_event(self, event: Event) -> None:
            if event.kind == "straggler":
                reported.touch()

    def plain() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (
            not reported.exists() and time.monotonic() < deadline
        ):  # a stop would come after equally many steps on all ranks
            time.sleep(SLOW_S if is_slow() else SLOW_S / 10)
            raysgd.report(step=0)

    with make_trainer(tmp_path, **TRAINER | {"backend": "none"}) as trainer:
        trainer.run(plain, callbacks=[*quiet(), CreateFileAtStraggler()])
        check_reported_once(trainer, "straggler")
