"""A cluster whose idle processes have imported torch, by Ray's setting: workers still get what the run asks for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from raysgd.cli.doctor.nodes import check_cluster
from support.poll import until
from support.runs import make_trainer, quiet, travels_by_value

RAY_INIT = {"num_cpus": 4, "_system_config": {"preload_python_modules": ["torch"]}}
travels_by_value(__name__)

VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "FROM_RUN")


def describe(config: Any) -> dict[str, Any]:
    import torch

    return {"threads": torch.get_num_threads(), **{name: os.environ.get(name) for name in VARIABLES}}


@pytest.mark.parametrize("cpus", [1, 2])
def test_workers_use_as_many_threads_as_they_have_cpus(ray_cluster: Any, tmp_path: Path, cpus: int) -> None:
    with make_trainer(tmp_path, 2, "torch", cpus_per_worker=cpus) as trainer:
        found = trainer.run(describe, {}, callbacks=quiet(), returns="all")
    assert found == [{"threads": cpus, "OMP_NUM_THREADS": str(cpus), "CUDA_VISIBLE_DEVICES": "", "FROM_RUN": None}] * 2


def test_runtime_environment_is_that_of_the_run(ray_cluster: Any, tmp_path: Path) -> None:
    environment = {"env_vars": {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "none", "FROM_RUN": "yes"}}
    with make_trainer(tmp_path, 1, "torch", runtime_env=environment) as trainer:
        found = trainer.run(describe, {}, callbacks=quiet())
    assert found == {"threads": 3, "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "none", "FROM_RUN": "yes"}


def test_other_backends_find_torch_imported_and_no_gpu_in_use(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func() -> tuple[bool, bool]:
        return "torch" in sys.modules, sys.modules["torch"].cuda.is_initialized()

    with make_trainer(tmp_path, 1, "none") as trainer:
        assert trainer.run(train_func, callbacks=quiet()) == (True, False), "imported, and no GPU is touched"


def test_doctor_says_that_processes_are_preloaded(ray_cluster: Any, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address

    def texts() -> list[str]:
        return [one.what for one in check_cluster(address, str(tmp_path)) if one.check == "start"]

    assert until(lambda: any("import torch before they get work" in text for text in texts()), 60)
