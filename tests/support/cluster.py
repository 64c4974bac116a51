"""What a test could leave behind in the Ray cluster it ran on."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray.util import list_named_actors, placement_group_table

from support.poll import until

# Not given out to workers, or not given back at once by design.
UNCOUNTED = ("memory", "object_store_memory", "node:", "accelerator_type:")


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

    def leftovers(self, timeout_s: float = 10) -> list[str]:
        """Wait until the cluster is as it was here, and say in words what is not."""
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
