"""Ray's global control service (GCS) dies during a run: training needs it only to start processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing import check_history
from support.cluster import cluster_of_one
from support.gcs import GlobalControlService, redis_server
from support.runs import PATIENCE_S, events_of, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.fault
travels_by_value(__name__)

STEPS = 40
#: Those of a run that has to end before Ray ends it, also on a busy machine.
FEW_STEPS = 15


@pytest.fixture(scope="module")
def gcs(_no_process_is_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlobalControlService]:
    """Yield the GCS of a cluster of one node; its state is in Redis, so that a new GCS can take over."""
    with pytest.MonkeyPatch.context() as patch, redis_server(tmp_path_factory.mktemp("redis")) as address:
        patch.setenv("RAY_REDIS_ADDRESS", address)
        with cluster_of_one(num_cpus=4):
            gcs = GlobalControlService()
            yield gcs
        gcs.kill()


def steps(config: dict[str, Any]) -> int:
    state = raysgd.load_checkpoint()
    for step in range(0 if state is None else state["step"] + 1, config.get("num_steps", STEPS)):
        raysgd.report(step=step, pid=os.getpid())
        raysgd.save_checkpoint({"step": step})
        raysgd.barrier()
        time.sleep(0.1)
    return os.getpid()


@pytest.mark.parametrize("a_worker_dies", [False, True], ids=["alone", "with a worker"])
def test_run_continues_while_the_gcs_restarts(gcs: GlobalControlService, tmp_path: Path, a_worker_dies: bool) -> None:
    with make_trainer(tmp_path, failure_config=raysgd.FailureConfig(abort_grace_s=20)) as trainer:
        stream = trainer.run_generator(steps, {}, callbacks=quiet(), returns="all")
        results = []
        for result in stream:
            results.append(result)
            if len(results) == 5:
                gcs.kill()
                if a_worker_dies:
                    os.kill(result.workers[1]["pid"], signal.SIGKILL)
            if len(results) == (5 if a_worker_dies else 15):
                gcs.start()
        first, last = results[0], results[-1]
        assert last["step"] == STEPS - 1
        assert len(events_of(trainer, "failure")) == last["attempt"] - 1 == int(a_worker_dies)
        assert last.workers[0]["pid"] == first.workers[0]["pid"]
        assert (last.workers[1]["pid"] == first.workers[1]["pid"]) is not a_worker_dies
        check_history(str(trainer.run_dir), within_s=PATIENCE_S)
        again = trainer.run(steps, {}, callbacks=quiet(), returns="all")
        assert again == [metrics["pid"] for metrics in last.workers]


def test_controller_answers_while_the_gcs_does_not(gcs: GlobalControlService, tmp_path: Path) -> None:
    """A group with fewer workers than it wants asks the GCS every two seconds where there is room."""
    with make_trainer(tmp_path, num_workers=(1, 6)) as trainer:
        for result in trainer.run_generator(steps, {"num_steps": 3 * STEPS}, callbacks=quiet()):
            if result["step"] == 10:
                gcs.stop()
                resumed = threading.Timer(30, gcs.resume)  # if no results arrive
                resumed.start()
            if result["step"] == 60:
                assert resumed.is_alive(), "the controller waited for the GCS"
                resumed.cancel()
                gcs.resume()
        blocked = [event for event in events_of(trainer, "blocked_loop") if "ray/" in event["stack"]]
        assert not blocked, blocked[0]["stack"]
        check_history(str(trainer.run_dir), within_s=PATIENCE_S)


#: Its arguments: storage path, the file that says how far the driver has read, and the steps.
PROGRAM = """
    import sys
    import ray
    import raysgd
    from support.gcs import GlobalControlService
    from fault.test_gcs_death import steps

    storage, file, num_steps = sys.argv[1:]
    ray.init(address="local", num_cpus=3, include_dashboard=False)
    run = raysgd.RunConfig(storage_path=storage)
    trainer = raysgd.Trainer(2, backend="none", run_config=run)
    for result in trainer.run_generator(steps, {"num_steps": int(num_steps)}, callbacks=[]):
        if result["step"] == 5:
            GlobalControlService().kill()
        with open(file, "a") as written:
            print(result["step"], file=written)
"""


def lose_gcs(folder: Path, num_steps: int) -> str:
    """Run the program until Ray ends it; return what it has written to stderr."""
    without_redis = {name: value for name, value in os.environ.items() if name != "RAY_REDIS_ADDRESS"}
    environment = without_redis | {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])]),
    }
    arguments = [str(folder / "runs"), str(folder / "read"), str(num_steps)]
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
    return subprocess.run(program, env=environment, stderr=subprocess.PIPE, timeout=180, check=False, text=True).stderr


def test_last_line_of_a_program_that_ray_ends_says_how_the_run_is_resumed(tmp_path: Path) -> None:
    """Ray ends the program without Python, so another process has to say it."""
    lines = lose_gcs(tmp_path, 100 * STEPS).splitlines()
    (run_dir,) = (tmp_path / "runs").glob("*/run_001")
    assert f"raysgd.Trainer.restore({str(run_dir)!r}) resumes it from its newest checkpoint" in lines[-1], lines[-5:]
    assert lines[-1].startswith("[raysgd] this program has ended before its run in ")


def test_results_arrive_and_are_stored_when_the_gcs_is_lost(tmp_path: Path) -> None:
    """Ray ends the driver and all processes of the cluster after a minute, here after a quarter of that.

    Which of its own timeouts ends the driver first, and what that says, is Ray's.
    """
    file = tmp_path / "read"
    lose_gcs(tmp_path, FEW_STEPS)
    assert file.read_text().split() == [str(step) for step in range(FEW_STEPS)]
    (run_dir,) = (tmp_path / "runs").glob("*/run_001")
    check_history(str(run_dir), within_s=PATIENCE_S)
    assert raysgd.load_run(run_dir).checkpoints[-1].load()["step"] == FEW_STEPS - 1
