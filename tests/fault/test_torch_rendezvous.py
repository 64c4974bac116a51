"""Torch groups that rendezvous at an address of the user, before and after a worker death."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import WorkerError
from support.poll import until
from support.ports import free_port
from support.runs import PATIENCE_S, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120), pytest.mark.usefixtures("ray_cluster")]
travels_by_value(__name__)


def sums(config: dict[str, Any]) -> tuple[float, str | None]:
    """Sum over the ranks; rank 0, which hosts the store, dies once before."""
    import torch
    import torch.distributed as dist

    if raysgd.world_rank() == 0 and once(config["folder"], "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total), os.environ.get("MASTER_PORT")


@pytest.mark.parametrize("form", ["tcp", "env", "file"])
def test_groups_rendezvous_at_a_given_address_repeatedly(tmp_path: Path, form: str) -> None:
    port = free_port()
    init_method = {"tcp": f"tcp://127.0.0.1:{port}", "env": "env://", "file": f"file://{tmp_path}/rendezvous"}[form]
    env_vars = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if form == "env" else {}
    settings: dict[str, Any] = {
        "runtime_env": {"env_vars": env_vars},
        "failure_config": raysgd.FailureConfig(max_failures=1),
    }
    with make_trainer(tmp_path / "runs", 2, raysgd.TorchConfig(init_method=init_method), **settings) as trainer:
        for _ in range(2):
            returned = trainer.run(sums, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
            assert [total for total, _ in returned] == [2.0, 2.0]
            assert {where for _, where in returned} == ({None} if form == "file" else {str(port)})
        assert until(lambda: not list(tmp_path.glob("rendezvous*")), PATIENCE_S)


def test_rendezvous_address_of_another_node_ends_the_run_with_an_explanation(tmp_path: Path) -> None:
    config = raysgd.TorchConfig(init_method="tcp://192.0.2.77:29500")
    with (
        make_trainer(tmp_path, 2, config) as trainer,
        pytest.raises(WorkerError, match=r"cannot listen at 192\.0\.2\.77:29500"),
    ):
        trainer.run(os.getpid, callbacks=quiet())
