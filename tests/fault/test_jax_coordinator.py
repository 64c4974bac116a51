"""JAX's coordination service lives in a process beside the controller. Where that one dies, a run goes on with another."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing import check_history
from support.runs import (
    PATIENCE_S,
    actor_pids,
    are_gone,
    events_of,
    latest_run,
    make_trainer,
    quiet,
    travels_by_value,
)
from support.totals import with_jax

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fault,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed: pip install raysgd[jax]"),
]
travels_by_value(__name__)
travels_by_value("support.totals")

NUM_STEPS = 60


def sums() -> list[float]:
    """A sum, a report and a checkpoint per step."""
    total = with_jax()
    state = raysgd.load_checkpoint() or {"step": -1, "sums": []}
    found = list(state["sums"])
    for step in range(state["step"] + 1, NUM_STEPS):
        found.append(total(raysgd.world_rank() + 1))
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step, "sums": found})
        time.sleep(0.1)
    return found


def test_a_run_goes_on_when_the_coordinator_is_killed(ray_cluster: Any, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=2, abort_grace_s=20)
    with make_trainer(tmp_path, 2, "jax", failure=failure) as trainer:
        stream = trainer.run_generator(sums, callbacks=quiet(), returns="all")
        for result in stream:
            if result["step"] == 5:
                break
        (coordinator,) = actor_pids("CoordinatorActor")
        os.kill(coordinator, signal.SIGKILL)
        returned = stream.get_returns()
        failures = events_of(trainer, "failure")
        run = latest_run(trainer)
    assert are_gone([coordinator])
    # JAX ends the processes that lose their service. Mostly they are seen to die together.
    assert 1 <= len(failures) <= 2, failures
    check_history(run.run_dir, within_s=PATIENCE_S)
    assert returned == [[3.0] * NUM_STEPS] * 2
    assert run.metrics["step"].tolist() == list(range(NUM_STEPS))
