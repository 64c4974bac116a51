"""Preloaded processes on several nodes: each node has one, and a replacement takes over that of its own node."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import raysgd
from raysgd.workers.process.preload import PreloadedProcess
from support.cluster import processes_of
from support.poll import until
from support.preloaded import list_preloaded, list_started
from support.runs import PATIENCE_S, are_gone, events_of, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
travels_by_value(__name__)

NODES = (1, 1)


def preloaded() -> dict[str, PreloadedProcess]:
    """Return the processes that are ready, by node."""
    return {process.node_id: process for process in list_preloaded()}


def report_until_file_exists(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    node = ray.get_runtime_context().get_node_id()
    is_over = torch.zeros(1)
    while not is_over.item():
        is_over.fill_(os.path.exists(config["file"]))
        dist.all_reduce(is_over)
        raysgd.report(node=node, pid=os.getpid())
        time.sleep(0.05)


def test_each_node_has_a_preloaded_process(cluster: Cluster, tmp_path: Path) -> None:
    config = {"file": str(tmp_path / "go")}
    with make_trainer(tmp_path / "runs", 2, "torch", failure_config=raysgd.FailureConfig(preload=True)) as trainer:
        stream = trainer.run_generator(report_until_file_exists, config, callbacks=quiet())
        members = next(stream).workers
        assert until(lambda: len(preloaded()) == 2, PATIENCE_S), "no process was preloaded on some node"
        processes = preloaded()
        for member in members:
            os.kill(member["pid"], signal.SIGKILL)
        later = next(result for result in stream if result["attempt"] == 2).workers
        assert {member["node"]: member["pid"] for member in later} == {
            node_id: process.pid for node_id, process in processes.items()
        }
        assert until(lambda: len(preloaded()) == 2, PATIENCE_S)
        left = [process.pid for process in preloaded().values()]
        (tmp_path / "go").touch()
        stream.get_returns()
    assert are_gone(left), "processes outlived their Trainer"


def test_process_for_a_silent_node_is_started_elsewhere_and_ends_with_the_trainer(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    config = {"file": str(tmp_path / "go")}
    failure = raysgd.FailureConfig(heartbeat_timeout_s=24)  # after half of it a process is requested
    with make_trainer(tmp_path / "runs", 2, "torch", failure_config=failure) as trainer:
        stream = trainer.run_generator(report_until_file_exists, config, callbacks=quiet())
        members = {member["node"] for member in next(stream).workers}
        own_node = ray.get_runtime_context().get_node_id()
        frozen = processes_of(next(node for node in cluster.worker_nodes if node.node_id in members - {own_node}))
        try:
            for process in frozen:
                process.suspend()
            has_started = until(list_started, PATIENCE_S)
        finally:
            for process in frozen:
                process.resume()
        assert has_started, "no process was requested while the node was silent"
        (started,) = list_started()
        assert started.node_id not in members
        (tmp_path / "go").touch()
        stream.get_returns()
        assert events_of(trainer, "failure") == []
    assert until(lambda: not list_started(), PATIENCE_S) and are_gone([started.pid])
