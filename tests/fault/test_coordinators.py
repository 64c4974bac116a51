"""JAX's coordination service, and Horovod's rendezvous server, live in a process next to the controller.

When that process dies, the run continues with another one.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing import FaultPlan, KillProcess, StopProcess, check_history
from support.frameworks import needs_horovod
from support.poll import until
from support.runs import (
    PATIENCE_S,
    actor_pids,
    are_gone,
    events_of,
    latest_run,
    make_trainer,
    once,
    quiet,
    travels_by_value,
)
from support.totals import with_horovod_and_torch, with_jax

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(240),
]
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed: pip install raysgd[jax]"
)
travels_by_value(__name__)
travels_by_value("support.totals")

NUM_STEPS = 60


def sums() -> list[float]:
    """Make a sum, a report and a checkpoint in each step."""
    total = with_jax()
    state = raysgd.load_checkpoint() or {"step": -1, "sums": []}
    found = list(state["sums"])
    for step in range(state["step"] + 1, NUM_STEPS):
        found.append(total(raysgd.world_rank() + 1))
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step, "sums": found})
        time.sleep(0.1)
    return found


@needs_jax
@pytest.mark.parametrize("fault", [KillProcess, StopProcess], ids=["killed", "stopped"])
def test_run_resumes_after_jax_coordination_service_death(
    ray_cluster: Any, tmp_path: Path, fault: type[KillProcess]
) -> None:
    plan = FaultPlan([fault(process="coordinator", step=5)])
    failure = raysgd.FailureConfig(max_failures=2, abort_grace_s=20, heartbeat_timeout_s=3)
    with make_trainer(tmp_path, 2, "jax", failure_config=failure) as trainer:
        returned = trainer.run(plan.wrap(sums), callbacks=quiet(), returns="all")
        failures = events_of(trainer, "failure")
        run = latest_run(trainer)
    plan.assert_all_fired()
    # JAX ends processes that lose their coordination service. Mostly the deaths are detected together.
    assert 1 <= len(failures) <= 2, failures
    check_history(run.run_dir, within_s=PATIENCE_S)
    assert returned == [[3.0] * NUM_STEPS] * 2
    assert run.metrics["step"].tolist() == list(range(NUM_STEPS))


def sums_with_horovod(config: dict[str, Any]) -> list[float]:
    """Rank 1 dies once, ten steps after the file exists; the loop ends ten steps later."""
    total = with_horovod_and_torch()
    state = raysgd.load_checkpoint() or {"step": -1, "sums": []}
    found, since = list(state["sums"]), 0
    mark = Path(config["folder"], "rank_1_is_gone")
    has_gone = mark.exists()
    for step in itertools.count(state["step"] + 1):
        since += Path(config["folder"], "server_is_gone").exists()
        if since == 10 and raysgd.world_rank() == 1 and once(config["folder"], mark.name):
            os.kill(os.getpid(), signal.SIGKILL)
        found.append(total(raysgd.world_rank() + 1))
        raysgd.report(step=step, pid=os.getpid())
        raysgd.save_checkpoint({"step": step, "sums": found})
        if has_gone and since == 10:
            break
        time.sleep(0.1)
    return found


@needs_horovod
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_next_group_gets_a_new_horovod_server_after_its_death(ray_cluster: Any, tmp_path: Path, number: int) -> None:
    failure = raysgd.FailureConfig(max_failures=1, abort_grace_s=20, heartbeat_timeout_s=3)
    with make_trainer(tmp_path, 2, "horovod", failure_config=failure) as trainer:
        config = {"folder": str(tmp_path)}
        stream = trainer.run_generator(sums_with_horovod, config, callbacks=quiet(), returns="all")
        for result in stream:
            if result["step"] == 5:
                break
        (first,) = actor_pids("CoordinatorActor")
        os.kill(first, number)
        assert until(lambda: are_gone([first]), PATIENCE_S)
        (tmp_path / "server_is_gone").touch()
        returned = stream.get_returns()
        failures = events_of(trainer, "failure")
        run = latest_run(trainer)
        (second,) = actor_pids("CoordinatorActor")
    assert len(failures) == 1, failures
    assert second != first
    check_history(run.run_dir, within_s=PATIENCE_S)
    assert returned == [[3.0] * len(run.metrics)] * 2
    assert run.metrics["pid"].nunique() == 1, "rank 0 was replaced"
