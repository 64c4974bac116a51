"""A node that does not see the storage path is detected before training.

The second node lives in a mount namespace of its own, where the folder is hidden by another file system.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import raysgd
from raysgd.errors import ConfigError
from support.poll import until
from support.runs import latest_run, make_trainer, quiet, travels_by_value

CAN_HIDE = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
)
pytestmark = [
    pytest.mark.skipif(not CAN_HIDE, reason="needs the right to make a mount namespace"),
]
travels_by_value(__name__)

HIDE_AND_START = """
mount -t tmpfs tmpfs "$1" && exec "$2" start --address="$3" --num-cpus=2 --block --disable-usage-stats
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is hidden from the second node."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module", autouse=True)
def two_nodes(_no_process_is_left: None, hidden: Path) -> Iterator[None]:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "resources": {"disk": 2}}
    )
    start = str(Path(sys.executable).parent / "ray")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", HIDE_AND_START, "sh", str(hidden), start, cluster.address],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ray.init(address=cluster.address, namespace="tests")
    assert until(lambda: ray.cluster_resources().get("CPU") == 4, 60)
    yield
    ray.shutdown()
    node.send_signal(signal.SIGTERM)
    node.wait(30)
    cluster.shutdown()


def rank() -> int:
    return raysgd.world_rank()


def test_folder_on_the_disk_of_one_node_is_refused(hidden: Path) -> None:
    with (
        make_trainer(hidden / "runs", 2, placement_strategy="STRICT_SPREAD") as trainer,
        pytest.raises(ConfigError, match=r"is on one node's disk: .* cannot see it"),
    ):
        trainer.run(rank, callbacks=quiet())
    assert not list(hidden.rglob("probe"))


def test_shared_folder_is_accepted(tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, placement_strategy="STRICT_SPREAD") as trainer:
        assert trainer.run(rank, callbacks=quiet(), returns="all") == [0, 1]


class Log(raysgd.Callback):
    runs_in = "controller"

    def on_run_start(self, info: raysgd.RunInfo) -> None:
        Path(info.run_dir, "from-the-callbacks").touch()


def save() -> None:
    raysgd.report(step=0)
    raysgd.save_checkpoint({"step": 0})


@pytest.mark.parametrize("again", range(3))  # Ray places randomly among equal nodes
def test_files_are_on_the_disk_of_the_driver_node(hidden: Path, again: int) -> None:
    settings: dict[str, Any] = {"cpus_per_worker": 0.5, "resources_per_worker": {"disk": 1}}
    with make_trainer(hidden / f"runs-{again}", 2, **settings) as trainer:
        trainer.run(save, callbacks=[*quiet(), Log()])
        run = latest_run(trainer)
        assert run.outcome == "done" and len(run.metrics) == len(run.checkpoints) == 1
        assert Path(str(trainer.run_dir), "from-the-callbacks").exists()
