"""What a test could leave behind in the Ray cluster it ran on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import list_named_actors, placement_group_table

from support.poll import until

# Not given out to workers, or not given back at once by design.
UNCOUNTED = ("memory", "object_store_memory", "node:", "accelerator_type:")


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


@dataclass(frozen=True)
class ClusterState:
    """Live placement groups, named actors, and what is free."""

    groups: frozenset[str]
    actors: frozenset[str]
    free: dict[str, float]

    @classmethod
    def now(cls) -> ClusterState:
        return cls(
            groups=frozenset(
                f"{name[:12]} ({group['state']})"
                for name, group in placement_group_table().items()
                if group["state"] != "REMOVED"
            ),
            actors=frozenset(
                f"{actor['namespace']}/{actor['name']}" for actor in list_named_actors(all_namespaces=True)
            ),
            free=_countable(ray.available_resources()),
        )

    @classmethod
    def empty(cls) -> ClusterState:
        """The state of the cluster with nothing running on it."""
        return cls(groups=frozenset(), actors=frozenset(), free=_countable(ray.cluster_resources()))

    def leftovers(self, timeout_s: float = 60) -> list[str]:
        """Wait until the cluster is as it was here, and say in words what is not.

        The time is for what Ray Data starts for itself: an actor that needs no CPU holds one until it is up, which takes a
        loaded machine more than ten seconds.
        """
        until(lambda: not self._differences(), timeout_s)
        return self._differences()

    def _differences(self) -> list[str]:
        now = ClusterState.now()
        groups = [f"placement group {name} is left" for name in sorted(now.groups - self.groups)]
        actors = [f"actor {name} is left" for name in sorted(now.actors - self.actors)]
        held = [
            f"{name}: {now.free.get(name, 0):g} of {amount:g} free"
            for name, amount in self.free.items()
            if now.free.get(name, 0) < amount - 1e-6
        ]
        return groups + actors + held


def _countable(resources: dict[str, float]) -> dict[str, float]:
    return {
        name: amount for name, amount in resources.items() if not name.startswith(UNCOUNTED) and "_group_" not in name
    }
