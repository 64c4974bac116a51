"""An elastic run of logical workers, of which ten die at random, trains to the bits of one worker without a fault."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import raysgd
from support import logical_models
from support.logical_models import make_data, train, train_jax
from support.runs import events_of, latest_run, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]
travels_by_value(__name__)
cloudpickle.register_pickle_by_value(logical_models)

NUM_DEATHS = 10
NUM_STEPS = 60


def test_bits_are_those_of_one_worker_through_ten_deaths(ray_cluster: Any, tmp_path: Path) -> None:
    draw = random.Random(5)
    steps = sorted(draw.sample(range(5, NUM_STEPS), NUM_DEATHS))
    deaths = {str(step): draw.randrange(2) for step in steps}  # there are always two workers
    config = {"kind": "conv", "num_steps": NUM_STEPS, "deaths": deaths, "folder": str(tmp_path), "pause_s": 0.15}
    settings: dict[str, Any] = {"seed": 3, "deterministic": True, "logical_workers": 6, "cpus_per_worker": 1}
    data = make_data("conv", 100)
    with make_trainer(tmp_path / "calm", 1, "torch", **settings) as trainer:
        calm = trainer.run(train, config | {"deaths": {}}, dataset=data, callbacks=quiet())
    failure = raysgd.FailureConfig(max_failures=NUM_DEATHS, abort_grace_s=20)
    with make_trainer(tmp_path / "elastic", (2, 4), "torch", failure_config=failure, **settings) as trainer:
        returned = trainer.run(train, config, dataset=data, callbacks=quiet(), returns="all")
        assert len(events_of(trainer, "failure")) == NUM_DEATHS
        events = latest_run(trainer).events
        resizes = [(data["old"], data["new"]) for data in events[events["kind"] == "resize"]["data"]]
    assert all(each["digest"] == calm["digest"] for each in returned)
    assert returned[0]["start"] >= steps[-1] - 1, "it did not resume from the newest checkpoint"
    assert any(old > new for old, new in resizes) and any(old < new for old, new in resizes), f"resizes: {resizes}"


@pytest.mark.jax
def test_bits_are_those_of_one_worker_through_deaths_with_jax(ray_cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="optax is not installed: pip install raysgd[functions]")
    config = {"num_steps": 24, "deaths": {"5": 1, "13": 0}, "folder": str(tmp_path)}
    settings: dict[str, Any] = {"seed": 3, "deterministic": True, "logical_workers": 6}
    data = make_data("conv", 100)
    with make_trainer(tmp_path / "calm", 1, "jax", **settings) as trainer:
        calm = trainer.run(train_jax, config | {"deaths": {}}, dataset=data, callbacks=quiet())
    failure = raysgd.FailureConfig(max_failures=2)
    with make_trainer(tmp_path / "elastic", (2, 3), "jax", failure_config=failure, **settings) as trainer:
        returned = trainer.run(train_jax, config, dataset=data, callbacks=quiet(), returns="all")
        assert len(events_of(trainer, "failure")) == 2
    assert all(each["digest"] == calm["digest"] for each in returned)
    assert returned[0]["start"] >= 12
