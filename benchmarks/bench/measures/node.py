"""A node is lost with the worker on it, and there is room on another one: how long until the next step is finished.

Three nodes with room for a worker each, all on this machine; a group of two. *Killed*: the processes of a node are killed
with SIGKILL, so that their connections close. *Frozen*: they are stopped, as with a machine that hangs or a cable that is cut:
only silence tells.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import psutil

from bench.blows import Training
from bench.systems.fragile import FragileSystem

NAME = "node"
TITLE = "Node lost to next step"
SYSTEMS = ("ray_train", "raysgd_replace", "raysgd_spare")
QUICK_SYSTEMS = ("raysgd_replace",)
UNITS = {"killed_s": "s", "frozen_s": "s"}
IS_FRESH = True
REPEAT = 1
TIMEOUT_S = 500.0

_SIGNALS = {"killed_s": signal.SIGKILL, "frozen_s": signal.SIGSTOP}


def params(system: str, quick: bool) -> dict[str, Any]:
    killed, frozen = (1, 0) if quick or system == "ray_train" else (2, 1)
    spares = 1 if system == "raysgd_spare" else 0
    return {"num_workers": 2, "spares": spares, "limit_s": 150.0, "killed_s": killed, "frozen_s": frozen}


def run(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {}
    for name, number in _SIGNALS.items():
        series[name] = []
        for _ in range(params[name]):
            with system.counting_failures(), _nodes(system, params) as cluster:
                series[name].append(_lose_a_node(system, params, cluster, number))
    return series


def _lose_a_node(system: FragileSystem, params: dict[str, Any], cluster: Any, number: int) -> float:
    with Training(system, limit_s=params["limit_s"]) as training:
        group = training.wait_for_whole(2)
        nodes = {node: processes_of_node(node) for node in cluster.worker_nodes}
        hosts = [node for node, processes in nodes.items() if group.pids[-1] in [each.pid for each in processes]]
        struck = time.time()
        try:
            _signal(nodes[hosts[0]], number)
            return training.wait_after(group).first_step - struck
        finally:
            _signal(nodes[hosts[0]], signal.SIGKILL)


def processes_of_node(node: Any) -> list[psutil.Process]:
    """All of them: what Ray started for the node, first of all its raylet, and what that started."""
    found = []
    for started in node.all_processes.values():
        for each in started:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(each.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


@contextlib.contextmanager
def _nodes(system: FragileSystem, params: dict[str, Any]) -> Any:
    """A head without CPUs and three nodes with one each; the system's processes live in it."""
    import ray
    from ray.cluster_utils import Cluster

    system.params = dict(params)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        system.reset()
    finally:
        ray.shutdown()
        cluster.shutdown()
