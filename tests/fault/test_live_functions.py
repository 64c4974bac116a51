"""Trainings of `raysgd.functions` continue by themselves from the memory of the workers that are left, to the same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import raysgd
from raysgd.functions import Deployer, FitResult, Trainer
from support.runs import once, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

NUM_WORKERS = 3
NUM_EPOCHS = 3
EXAMPLES = [
    {"id": number, "x": np.random.default_rng(number).normal(size=4).astype(np.float32)} for number in range(50)
]
#: Collated in the middle of the second epoch by the worker that dies.
DIES_AT = 31


def collate(examples: list[dict[str, Any]], folder: str, rank: int, delay_s: float | None) -> dict[str, Any]:
    """Collate a batch; the worker of this rank dies once, some time after it has read an example for the second time."""
    if raysgd.world_rank() == rank and any(each["id"] == DIES_AT for each in examples):
        if Path(folder, "read").exists() and delay_s is not None and once(folder, "died"):
            threading.Thread(target=die_after, args=(delay_s,)).start()
        Path(folder, "read").touch()
    noise = np.random.normal(size=(len(examples), 4)) * 0.1
    return {"x": np.stack([each["x"] for each in examples]) + noise.astype(np.float32)}


def die_after(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def loss_fn(train_rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    noise = jax.random.normal(train_rng, batch["x"].shape) if is_training else 0
    hidden = jax.numpy.tanh((batch["x"] + 0.1 * noise) @ params["w"])
    return ((hidden @ params["v"] - 1) ** 2).mean()


def fit(
    deployer: Deployer,
    folder: Path,
    rank: int = -1,
    delay_s: float | None = None,
    *,
    is_divided: bool = False,
    **settings: Any,
) -> FitResult:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 8)).astype(np.float32), "v": rng.normal(size=(8, 1)).astype(np.float32)}
    trainer = Trainer(
        deployer,
        collate_fn=partial(collate, folder=str(folder), rank=rank, delay_s=delay_s),
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(0.03),
        params_sharding_rules=deployer.get_sharding_rules(params) if is_divided else None,
    )
    given = {
        "train_examples": EXAMPLES,
        "per_device_batch_size": 2,
        "n_epochs": NUM_EPOCHS,
        "eval_examples": EXAMPLES[:9],
    }
    return trainer.fit(**{**given, **settings})


def events_of(result: FitResult, kind: str) -> list[dict[str, Any]]:
    events = raysgd.load_run(str(result.run_dir)).events
    return [*events[events["kind"] == kind]["data"]]


@pytest.fixture(scope="module")
def deployer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployer]:
    failure = raysgd.FailureConfig(max_failures=3, num_spares=1)
    folder = tmp_path_factory.mktemp("runs")
    with Deployer(
        7, 1, num_workers=NUM_WORKERS, devices_per_worker=1, verbose=False, failure_config=failure, workdir=folder
    ) as made:
        yield made


@pytest.fixture(scope="module")
def calm(deployer: Deployer, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return fit(deployer, tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize(("rank", "delay_s"), [(0, 0.0), (1, 0.0), (1, 0.004), (2, 0.012)])
def test_training_continues_from_the_memory_of_survivors(
    deployer: Deployer, calm: FitResult, tmp_path: Path, rank: int, delay_s: float
) -> None:
    result = fit(deployer, tmp_path, rank, delay_s)
    second = events_of(result, "attempt_start")[1]
    assert (second["checkpoint"], second["memory"]) == (None, None) and second["live"] is not None, events_of(
        result, "warning"
    )
    (continued,) = events_of(result, "continued")
    assert (continued["ranks"], continued["num_repeated"]) == ([rank], 1)
    assert result.history == calm.history
    assert result.num_steps == calm.num_steps
    jax.tree.map(np.testing.assert_array_equal, result.params, calm.params)


def test_parts_of_the_state_are_copied_to_memory(ray_cluster: Any, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=3, num_spares=1)
    with Deployer(
        7, 2, num_workers=2, devices_per_worker=1, verbose=False, failure_config=failure, workdir=tmp_path / "runs"
    ) as deployer:
        calm = fit(deployer, tmp_path / "calm", is_divided=True)
        (tmp_path / "read").touch()  # the worker dies in the first epoch, before anything is saved
        result = fit(deployer, tmp_path, 1, 0.004, is_divided=True)
    second = events_of(result, "attempt_start")[1]
    assert (second["checkpoint"], second["memory"]) == (None, None) and second["live"] is not None, events_of(
        result, "warning"
    )
    (continued,) = events_of(result, "continued")
    assert continued["ranks"] == [1] and "from memory copies" in continued["why"]
    assert result.history == calm.history
    jax.tree.map(np.testing.assert_array_equal, result.params, calm.params)
