"""`check_cluster`: checks what a run or a Trainer left behind in the Ray cluster. Runs in the driver.

Ray is imported in functions, because the rest of this package works without Ray.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

# Resources that workers do not reserve, or that are not returned at once by design.
_UNCOUNTED = ("memory", "object_store_memory", "node:", "accelerator_type:")
_INTERVAL_S = 0.05


class LeakError(AssertionError):
    """Actors, placement groups or resources were left behind.

    Attributes:
        leaks: One sentence each.
    """

    def __init__(self, leaks: tuple[str, ...]) -> None:
        super().__init__(leaks)
        self.leaks = leaks

    def __str__(self) -> str:
        return "left behind on the cluster: " + "; ".join(self.leaks)


#: Namespaces of actors that Ray Data starts and keeps as long as the cluster lives.
RAY_DATA_NAMESPACES = frozenset({"AutoscalingCoordinator", "DataUsageCollectionActor", "_dataset_stats_actor"})


@dataclass(frozen=True)
class ClusterState:
    """The placement groups, actors and free resources of a cluster at one moment.

    Attributes:
        groups: The placement groups, with their states.
        actors: The named actors, as ``namespace/name``.
        free: The free resources, by name.
    """

    groups: frozenset[str]
    actors: frozenset[str]
    free: dict[str, float]

    @classmethod
    def now(cls) -> ClusterState:
        """Return the state of the cluster that this process is connected to."""
        import ray
        from ray.util import list_named_actors, placement_group_table

        return cls(
            groups=frozenset(
                f"{name[:12]} ({group['state']})"
                for name, group in placement_group_table().items()
                if group["state"] != "REMOVED"
            ),
            actors=frozenset(
                f"{actor['namespace']}/{actor['name']}"
                for actor in list_named_actors(all_namespaces=True)
                if actor["namespace"] not in RAY_DATA_NAMESPACES
            ),
            free=_countable(ray.available_resources()),
        )

    @classmethod
    def empty(cls) -> ClusterState:
        """Return the state of the cluster with nothing running on it."""
        import ray

        return cls(groups=frozenset(), actors=frozenset(), free=_countable(ray.cluster_resources()))

    def leftovers(self, timeout_s: float = 60) -> list[str]:
        """Wait until the cluster is in this state again; return a sentence for each difference that remains.

        The timeout allows for Ray Data's actors: an actor that needs no CPU reserves one until it has started, which takes
        more than ten seconds on a loaded machine.
        """
        deadline = time.monotonic() + timeout_s
        while (left := self._differences()) and time.monotonic() < deadline:
            time.sleep(_INTERVAL_S)
        return left

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


def check_cluster(before: ClusterState, timeout_s: float = 10) -> None:
    """Check that the cluster is as before: no new actor or placement group, and all resources that were free are free.

    Args:
        before: The result of `ClusterState.now` before the Trainer was created.
        timeout_s: The time to wait, because Ray returns resources a moment later.

    Raises:
        LeakError: The error lists everything that was left.
    """
    if left := before.leftovers(timeout_s):
        raise LeakError(tuple(left))


def _countable(resources: dict[str, float]) -> dict[str, float]:
    return {
        name: amount for name, amount in resources.items() if not name.startswith(_UNCOUNTED) and "_group_" not in name
    }
