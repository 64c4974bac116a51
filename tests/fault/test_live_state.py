"""A worker is killed at chosen moments of a step: training continues from what the others hold in memory, to the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.session import context
from support.row_log import rows_that_count
from support.runs import events_of, latest_run, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

NUM_WORKERS = 3
NUM_ROWS = 60
NUM_EPOCHS = 2
BATCH = 2
DIES_AT = 7


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model with dropout and batch norm; one rank dies once, at a moment of step `DIES_AT`.

    The steps in ``waits`` wait until a group of this size has continued.
    """
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1)
    model = raysgd.torch.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    live = raysgd.live_state(model=model, optimizer=optimizer, scheduler=scheduler)
    state = raysgd.load_checkpoint()
    step = 0
    if state is not None:
        live.load_state_dict(state)
        step = state["step"]
        Path(config["folder"], f"continued-{raysgd.world_size()}").touch()

    def die(moment: str) -> None:
        """Die if this is the moment; rank None: all ranks die, each once."""
        rank = raysgd.world_rank()
        is_due = moment == config["moment"] and step == DIES_AT - 1 and config["rank"] in (None, rank)
        if is_due and once(config["folder"], f"died-{rank}"):
            os.kill(os.getpid(), config.get("signal", signal.SIGKILL))

    model[0].weight.register_hook(lambda grad: die("in the backward pass"))
    optimizer.register_step_pre_hook(lambda *args: die("before the optimizer's step"))
    optimizer.register_step_post_hook(lambda *args: die("after the optimizer's step"))
    batches = raysgd.get_dataset().get_split().to_torch(batch_size=BATCH, shuffle="full")
    log = Path(config["folder"], f"{context.installed().attempt}-{step}-{raysgd.world_rank()}")
    for epoch in range(batches.epoch, NUM_EPOCHS):
        for batch in batches:
            with log.open("a") as file:
                file.writelines(f"{step + 1} {epoch} {row}\n" for row in batch["row"].tolist())
            die("before the forward pass")
            size = config.get("waits", {}).get(step + 1)
            while size is not None and not Path(config["folder"], f"continued-{size}").exists():
                time.sleep(0.01)
            loss = (model(batch["x"].float()) - batch["row"][:, None]).square().mean()
            die("after the forward pass")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            raysgd.report(step=step)
            live.step(step=step)
            if step == config.get("saves_at"):
                raysgd.save_checkpoint(live)
    tensors = {**model.state_dict(), **dict(enumerate(state["exp_avg"] for state in optimizer.state.values()))}
    return {"step": step, "tensors": {str(name): tensor.numpy() for name, tensor in tensors.items()}}


def data() -> dict[str, Any]:
    return {"x": np.random.default_rng(0).normal(size=(NUM_ROWS, 4)), "row": np.arange(NUM_ROWS)}


def check_rows(folder: Path) -> None:
    """Check that each row of each epoch counts once."""
    assert rows_that_count(folder) == Counter(
        {(epoch, row): 1 for epoch in range(NUM_EPOCHS) for row in range(NUM_ROWS)}
    )


TRAINER = {
    "num_workers": NUM_WORKERS,
    "backend": "torch",
    "failure_config": raysgd.FailureConfig(max_failures=3, num_spares=1),
    "seed": 3,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def calm(trainer: raysgd.Trainer, tmp_path_factory: Any) -> dict[str, Any]:
    config = {"moment": "", "rank": -1, "folder": str(tmp_path_factory.mktemp("calm"))}
    return trainer.run(train, config, dataset=data(), callbacks=quiet())


MOMENTS = (
    "before the forward pass",
    "after the forward pass",
    "in the backward pass",
    "before the optimizer's step",
    "after the optimizer's step",
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_run_continues_from_the_memory_of_survivors(
    trainer: raysgd.Trainer, calm: dict[str, Any], tmp_path: Path, moment: str, rank: int
) -> None:
    config = {"moment": moment, "rank": rank, "folder": str(tmp_path)}
    value = trainer.run(train, config, dataset=data(), callbacks=quiet())
    first, second = events_of(trainer, "attempt_start")
    assert first["live"] is None
    assert second["live"][1] >= DIES_AT - 1 and (second["checkpoint"], second["memory"]) == (None, None)
    (continued,) = events_of(trainer, "continued")
    source = 0 if rank else 1
    assert (continued["ranks"], continued["source"], continued["num_repeated"]) == ([rank], source, 1)
    assert continued["why"] == (
        f"rank {rank} died; continued after {continued['seconds']:.2f} s from the memory of rank {source}, one step repeated, "
        "nothing read from storage"
    )
    assert value["step"] == calm["step"]
    for name, tensor in calm["tensors"].items():
        assert np.array_equal(tensor, value["tensors"][name]), f"{name} differs"
    check_rows(tmp_path)


@pytest.mark.parametrize(("sent", "num_failures"), [(signal.SIGKILL, 1), (signal.SIGTERM, 0)], ids=["death", "notice"])
def test_group_shrinks_and_grows_back_without_a_save(
    ray_cluster: Any, tmp_path: Path, sent: signal.Signals, num_failures: int
) -> None:
    """Each row counts once, each step is reported once, and nothing is read from storage."""
    folder = tmp_path / "log"
    folder.mkdir()
    failure = raysgd.FailureConfig(max_failures=1)
    with make_trainer(tmp_path / "runs", (2, 3), "torch", failure_config=failure, seed=3) as trainer:
        moment = "in the backward pass" if num_failures else "after the optimizer's step"
        config = {"moment": moment, "rank": 1, "folder": str(folder), "signal": sent}
        config["waits"] = {12: 3} if num_failures else {DIES_AT + 1: 2, 12: 3}
        value = trainer.run(train, config, dataset=data(), callbacks=quiet())
        attempts = [(each["world_size"], each["live"]) for each in events_of(trainer, "attempt_start")]
        assert len(events_of(trainer, "failure")) == num_failures
        steps = latest_run(trainer).metrics["step"].tolist()
    shrunk_at = DIES_AT - num_failures
    assert attempts == [(3, None), (2, [1, shrunk_at]), (3, [2, 11 - shrunk_at])]
    assert steps == list(range(1, value["step"] + 1))
    check_rows(folder)


def test_spare_takes_the_place_of_a_preempted_worker_without_a_save(
    trainer: raysgd.Trainer, calm: dict[str, Any], tmp_path: Path
) -> None:
    config = {"moment": "after the forward pass", "rank": 1, "folder": str(tmp_path), "signal": signal.SIGTERM}
    config["waits"] = {DIES_AT + 1: NUM_WORKERS}
    value = trainer.run(train, config, dataset=data(), callbacks=quiet())
    assert [each["live"] for each in events_of(trainer, "attempt_start")] == [None, [1, DIES_AT]]
    assert not events_of(trainer, "failure")
    for name, tensor in calm["tensors"].items():
        assert np.array_equal(tensor, value["tensors"][name]), f"{name} differs"


def test_run_continues_from_a_checkpoint_if_no_rank_is_left(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    config = {"moment": "in the backward pass", "rank": None, "folder": str(tmp_path), "saves_at": 4}
    value = trainer.run(train, config, dataset=data(), callbacks=quiet())
    second = events_of(trainer, "attempt_start")[1]
    assert (second["live"], second["iterations_before"]) == (None, 4)
    warnings = [each["message"] for each in events_of(trainer, "warning")]
    assert any("no rank is left that held the state of a complete step" in message for message in warnings), warnings
    assert value["step"] == NUM_EPOCHS * NUM_ROWS // NUM_WORKERS // BATCH
    check_rows(tmp_path)
