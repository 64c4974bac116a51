"""A Ray cluster for tests, and what a test could leave behind in it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raysgd.testing.cluster import ClusterState

__all__ = ["ClusterState", "cluster_of_two", "start_ray"]


#: A worker process that dies before it has told its node so, as Ray's own do at times, is missed after so many seconds
#: only, and all that time the actor it was for is not there. By default 60: half of what a test has.
_MISSED_AFTER_S = 30


def start_ray(**settings: Any) -> dict[str, Any]:
    """A cluster of one node, started here; returns what `ray.init` tells of it.

    Ray's own head process has been seen to die of heap corruption before it had written a line (Ray 2.60: ``malloc():
    unaligned fastbin chunk detected``, once in some thousand starts). `ray.init` then raises that it waited in vain for
    the file with the port. That start is made once more; any other error is the test's.
    """
    settings["_system_config"] = {"worker_register_timeout_seconds": _MISSED_AFTER_S} | settings.get(
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
def cluster_of_two() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of two nodes with two logical CPUs each, in which nothing may be left."""
    from ray.cluster_utils import Cluster

    # Ray counts a silent node as lost after three seconds instead of twenty.
    health = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 1000,
        "health_check_failure_threshold": 3,
    }
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": health})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, namespace="tests")
    yield cluster
    left = ClusterState.empty().leftovers()
    ray.shutdown()
    cluster.shutdown()
    assert not left, "; ".join(left)
