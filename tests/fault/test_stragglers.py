"""Ranks that are slower than the others, whether these wait for them or not: the run goes on and names them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.result import Event
from support.runs import events_of, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

SLOW_RANK = 1
#: Far above what a step of the others takes, on a loaded machine too.
SLOW_S = 0.12
#: Workers are asked a quarter of that apart, and a window is no shorter.
HEARTBEAT_S = 4.0
PATIENCE_S = 60.0
MAX_STEPS = round(PATIENCE_S / SLOW_S)
BATCH_SIZE = 2


@pytest.fixture(scope="module")
def trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    with slow_trainer(tmp_path_factory.mktemp("runs")) as trainer:
        yield trainer


def slow_trainer(folder: Path, backend: str = "torch", **settings: Any) -> raysgd.Trainer:
    failure = raysgd.FailureConfig(heartbeat_timeout_s=HEARTBEAT_S, max_failures=0)
    return make_trainer(folder, 3, backend, failure=failure, **settings)


class UntilTold(raysgd.Callback):
    """Ends the run with its first straggler."""

    def on_event(self, event: Event) -> None:
        if event.kind == "straggler":
            raise raysgd.Stop("told")


class Numbers:
    """A map-style dataset whose items are slow to come on one rank."""

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


# -- they wait in the averaging of gradients ---------------------------------------------------------------------------


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


def told_once(trainer: raysgd.Trainer, phase: str) -> None:
    (straggler,) = events_of(trainer, "straggler")
    assert (straggler["rank"], straggler["phase"]) == (SLOW_RANK, phase)
    # The first window may have steps from before it was slow.
    assert straggler["own_s"] >= 0.7 * SLOW_S and straggler["others_s"] <= straggler["own_s"] / 1.5
    assert straggler["since_s"] > 0
    (warning,) = [told for told in events_of(trainer, "warning") if "is slow" in told["message"]]
    assert f"rank {SLOW_RANK} on {straggler['node']} is slow" in warning["message"]
    assert warning["message"].endswith(f"most of the difference in: {phase}")
    assert events_of(trainer, "failure") == [] and events_of(trainer, "hang") == []


@pytest.mark.parametrize(
    ("train_func", "phase"),
    [(slow_compute, "compute"), (slow_dataset, "data"), (slow_loader, "data")],
    ids=["compute", "dataset", "loader"],
)
def test_the_rank_that_the_others_wait_for_is_named(trainer: raysgd.Trainer, train_func: Any, phase: str) -> None:
    data = Numbers() if train_func is slow_dataset else None
    trainer.run(train_func, {}, dataset=data, callbacks=[*quiet(), UntilTold()])
    told_once(trainer, phase)


@pytest.mark.long
def test_so_it_is_where_gradients_are_added_in_rank_order(ray_cluster: Any, tmp_path: Path) -> None:
    with slow_trainer(tmp_path, deterministic=True, seed=0) as trainer:
        trainer.run(slow_compute, {}, callbacks=[*quiet(), UntilTold()])
        told_once(trainer, "compute")


# -- they wait where nobody sees it, or not at all ---------------------------------------------------------------------


def own_wrapper(config: dict[str, Any]) -> None:
    """DistributedDataParallel of the user's own: first computing is slow, then reading."""
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
    """When reading began to be slow."""

    began: float | None = None

    def on_result(self, result: raysgd.Result) -> None:
        if result["step"] == -1:
            self.began = result["timestamp"]


def test_nobody_is_accused_where_waiting_cannot_be_seen_but_for_slow_data(trainer: raysgd.Trainer) -> None:
    moments = Moments()
    # Four windows of 20 steps, and one that is cut: where waiting is seen it takes three.
    trainer.run(own_wrapper, {"num_unseen": 100}, dataset=Numbers(), callbacks=[*quiet(), moments, UntilTold()])
    told_once(trainer, "data")
    events = raysgd.load_run(str(trainer.run_dir)).events
    (told_at,) = events[events["kind"] == "straggler"]["timestamp"]
    assert moments.began is not None and told_at > moments.began


@pytest.mark.long
def test_ranks_that_do_not_wait_for_each_other_are_compared_by_their_steps(ray_cluster: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"

    class Tell(raysgd.Callback):
        def on_event(self, event: Event) -> None:
            if event.kind == "straggler":
                told.touch()

    def plain() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not told.exists() and time.monotonic() < deadline:  # a stop comes after equally many steps on all
            time.sleep(SLOW_S if is_slow() else SLOW_S / 10)
            raysgd.report(step=0)

    with slow_trainer(tmp_path, "none") as trainer:
        trainer.run(plain, callbacks=[*quiet(), Tell()])
        told_once(trainer, "compute")
