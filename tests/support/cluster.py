"""A Ray cluster for tests, and what a test could leave behind in it."""

from __future__ import annotations

import warnings
from typing import Any

import ray

from raysgd.testing.cluster import ClusterState

__all__ = ["ClusterState", "start_ray"]


def start_ray(**settings: Any) -> dict[str, Any]:
    """A cluster of one node, started here; returns what `ray.init` tells of it.

    Ray's own head process has been seen to die of heap corruption before it had written a line (Ray 2.60: ``malloc():
    unaligned fastbin chunk detected``, once in some thousand starts). `ray.init` then raises that it waited in vain for
    the file with the port. That start is made once more; any other error is the test's.
    """
    try:
        return ray.init(address="local", **settings).address_info
    except RuntimeError as error:
        if "gcs_server_port" not in str(error):
            raise
        warnings.warn(f"Ray's head process did not start ({error}); trying once more", stacklevel=2)
        ray.shutdown()
        return ray.init(address="local", **settings).address_info
