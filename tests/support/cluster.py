"""Ray clusters for tests, and checks for what a test left behind in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from raysgd.testing.cluster import ClusterState

__all__ = ["ClusterState", "cluster_of", "cluster_of_one", "start_ray"]


#: After so many seconds Ray notices a worker process that died before it registered, as Ray's own sometimes do; its actor
#: is missing until then. Ray's default of 60 is half of a test's timeout.
_REGISTER_TIMEOUT_S = 30


def start_ray(**settings: Any) -> dict[str, Any]:
    """Start a cluster of one node; return its address info.

    About once in a thousand starts, Ray's head process dies of heap corruption before it has written its port (Ray 2.60:
    ``malloc(): unaligned fastbin chunk detected``), and `ray.init` raises that the file with the port is missing. Only
    that error leads to a second try.
    """
    settings["_system_config"] = {"worker_register_timeout_seconds": _REGISTER_TIMEOUT_S} | settings.get(
        "_system_config", {}
    )
    try:
        return ray.init(address="local", **settings).address_info
    except RuntimeError as error:
        if "gcs_server_port" not in str(error):
            raise
        warnings.warn(f"Ray's head process did not start ({error}); trying once more", stacklevel=2)
        ray.shutdown()
        return ray.init(address="local", **settings).address_info


@contextmanager
def cluster_of_one(**settings: Any) -> Iterator[None]:
    """Start a cluster of one node with these settings of `ray.init`; check that nothing is left in it."""
    start_ray(include_dashboard=False, namespace="tests", **settings)
    with _empty_at_the_end():
        yield


@contextmanager
def cluster_of(*num_cpus: int) -> Iterator[Any]:
    """Yield a `ray.cluster_utils.Cluster` of nodes with so many logical CPUs; check that nothing is left in it."""
    from ray.cluster_utils import Cluster

    # Ray then counts a silent node as lost after three seconds instead of twenty.
    settings = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 1000,
        "health_check_failure_threshold": 3,
        "worker_register_timeout_seconds": _REGISTER_TIMEOUT_S,
    }
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": num_cpus[0], "include_dashboard": False, "_system_config": settings},
    )
    for count in num_cpus[1:]:
        cluster.add_node(num_cpus=count)
    ray.init(address=cluster.address, namespace="tests")
    try:
        with _empty_at_the_end():
            yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def _empty_at_the_end() -> Iterator[None]:
    """Disconnect from the cluster at the end, and check that nothing is left in it."""
    yield
    left = ClusterState.empty().leftovers()
    ray.shutdown()
    assert not left, "left behind on the cluster: " + "; ".join(left)


def processes_of(node: Any) -> list[psutil.Process]:
    """Return the processes of a node: its raylet first, then all descendants."""
    raylets = [psutil.Process(each.process.pid) for started in node.all_processes.values() for each in started]
    return [process for raylet in raylets for process in (raylet, *raylet.children(recursive=True))]
