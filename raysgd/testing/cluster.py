"""`check_cluster`: what a run, or a Trainer, could leave behind in the Ray cluster. Driver side.

Ray is imported when it is asked: the rest of this package is of use without it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

# Not given out to workers, or not given back at once by design.
_UNCOUNTED = ("memory", "object_store_memory", "node:", "accelerator_type:")
_INTERVAL_S = 0.05


class LeakError(AssertionError):
    """Something was left behind.

    Attributes:
        leaks: One sentence each.
    """

    def __init__(self, leaks: tuple[str, ...]) -> None:
        super().__init__(leaks)
        self.leaks = leaks

    def __str__(self) -> str:
        return "left behind on the cluster: " + "; ".join(self.leaks)


#: Namespaces of actors that Ray Data starts for itself and keeps as long as the cluster lives.
OF_RAY_DATA = frozenset({"AutoscalingCoordinator", "_dataset_stats_actor"})


@dataclass(frozen=True)
class ClusterState:
    """What holds resources of a cluster.

    Attributes:
        groups: Placement groups that are there, with their states.
        actors: Named actors, ``namespace/name``.
        free: Free resources, by name.
    """

    groups: frozenset[str]
    actors: frozenset[str]
    free: dict[str, float]

    @classmethod
    def now(cls) -> ClusterState:
        """The state of the cluster that this process is connected to."""
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
                if actor["namespace"] not in OF_RAY_DATA
            ),
            free=_countable(ray.available_resources()),
        )

    @classmethod
    def empty(cls) -> ClusterState:
        """The state of the cluster with nothing running on it."""
        import ray

        return cls(groups=frozenset(), actors=frozenset(), free=_countable(ray.cluster_resources()))

    def leftovers(self, timeout_s: float = 60) -> list[str]:
        """Wait until the cluster is as it was here, and say in words what is not.

        The time is for what Ray Data starts for itself: an actor that needs no CPU holds one until it is up, which takes a
        loaded machine more than ten seconds.
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
    """Check that the cluster is as it was: no actor, no placement group and no resource is held that was free.

    Args:
        before: What `ClusterState.now` gave before the Trainer was made.
        timeout_s: Ray gives things back a moment after it was told to; so many seconds are waited for it.

    Raises:
        LeakError: With all that was left.
    """
    if left := before.leftovers(timeout_s):
        raise LeakError(tuple(left))


def _countable(resources: dict[str, float]) -> dict[str, float]:
    return {
        name: amount for name, amount in resources.items() if not name.startswith(_UNCOUNTED) and "_group_" not in name
    }
