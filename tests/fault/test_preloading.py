"""Preloaded processes: without a spare, a replacement takes over an idle process that has imported torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.workers.process.preload import VARIABLE, PreloadedProcess
from support.poll import until
from support.preloaded import list_preloaded
from support.project import ROOT
from support.runs import PATIENCE_S, are_gone, controller_pid, is_alive, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.fault
travels_by_value(__name__)

#: The environment of replacements is made of that of the job and that of the workers.
RAY_INIT = {"runtime_env": {"working_dir": str(ROOT / "tests" / "docs" / "schemas"), "env_vars": {"JOB_SHADE": "grün"}}}
#: Variables that belong to one process or to one group.
OF_ONE_PROCESS = {"MASTER_PORT", VARIABLE, "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"}


def wait_for_preloaded() -> PreloadedProcess:
    assert until(lambda: len(list_preloaded()) == 1, PATIENCE_S), "no process was preloaded"
    return list_preloaded()[0]


def has_torch() -> bool:
    return "torch" in sys.modules


def describe_until_file_exists(config: dict[str, Any]) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    environment = {name: value for name, value in os.environ.items() if name not in config["leave_out"]}
    seen = {"pid": os.getpid(), "num_threads": torch.get_num_threads(), "folder": os.getcwd()}
    if config["variable"] in os.environ:  # tasks have the runtime environment of the worker that starts them
        task: Any = ray.remote(num_cpus=0)(has_torch)
        seen["task_has_torch"] = ray.get(task.remote())
    is_over = torch.zeros(1)
    while not is_over.item():
        is_over.fill_(os.path.exists(config["file"]))
        dist.all_reduce(is_over)
        raysgd.report(**seen)
        time.sleep(0.05)
    return environment


@pytest.mark.parametrize("settings", [{}, {"runtime_env": {"env_vars": {"SHADE": "green"}}}], ids=["job", "both"])
def test_replacement_takes_over_the_preloaded_process(
    ray_cluster: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = {"file": str(tmp_path / "go"), "leave_out": OF_ONE_PROCESS, "variable": VARIABLE}
    with make_trainer(
        tmp_path / "runs",
        2,
        "torch",
        failure_config=raysgd.FailureConfig(preload=True, abort_grace_s=20),
        cpus_per_worker=2,
        **settings,
    ) as trainer:
        stream = trainer.run_generator(describe_until_file_exists, config, callbacks=quiet(), returns="all")
        survivor, victim = next(stream).workers
        process = wait_for_preloaded()
        os.kill(victim["pid"], signal.SIGKILL)
        same, replacement = next(result for result in stream if result["attempt"] == 2).workers
        assert same["pid"] == survivor["pid"] and replacement["pid"] == process.pid
        assert replacement == {**victim, "pid": process.pid, "task_has_torch": False}
        assert victim["num_threads"] == 2
        next_process = wait_for_preloaded()
        (tmp_path / "go").touch()
        environment, of_replacement = stream.get_returns()
        for name in ("RANK", "LOCAL_RANK"):
            assert (environment.pop(name), of_replacement.pop(name)) == ("0", "1")
        assert of_replacement == environment
        assert environment["OMP_NUM_THREADS"] == "2" and environment["JOB_SHADE"] == "grün"
        assert environment.get("SHADE") == ("green" if settings else None)
    assert are_gone([next_process.pid]), "the process outlived its Trainer"


def test_preloaded_process_outlives_the_controller(ray_cluster: Any, tmp_path: Path) -> None:
    config = {"file": str(tmp_path / "go"), "leave_out": OF_ONE_PROCESS, "variable": VARIABLE}
    with make_trainer(tmp_path / "runs", 1, "torch", failure_config=raysgd.FailureConfig(preload=True)) as trainer:
        stream = trainer.run_generator(describe_until_file_exists, config, callbacks=quiet())
        next(stream)
        process = wait_for_preloaded()
        os.kill(controller_pid(), signal.SIGKILL)
        next(result for result in stream if result["attempt"] == 2)
        assert is_alive(process.pid) and list_preloaded() == [process]
        (tmp_path / "go").touch()
        stream.get_returns()
