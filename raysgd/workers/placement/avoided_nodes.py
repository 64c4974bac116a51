"""The nodes on which a group starts no processes: lost, draining and faulty ones. Runs in the TrainerActor; needs no Ray."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement.capacity import Node, count_fitting

#: A node with this many deaths is faulty, if every other node has at least two deaths fewer.
MIN_DEATHS = 2
#: Deaths on a node within this time of each other count as one.
SAME_DEATH_S = 5.0


class AvoidedNodes:
    """Collects the nodes to avoid, over all runs of a group, and counts the deaths on each node.

    Args:
        bundle: A worker's resources.
        clock: Returns seconds since any fixed moment.

    Attributes:
        ids: The ids of the nodes to avoid.
    """

    def __init__(
        self,
        bundle: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ids: set[str] = set()
        self._bundle = bundle
        self._clock = clock
        self._deaths: Counter[str] = Counter()
        self._last_death: dict[str, float] = {}
        self._warnings: list[str] = []

    def add(self, node_ids: Collection[str]) -> None:
        """Avoid nodes that are lost or draining."""
        self.ids.update(node_ids)

    def remove_gone(self, nodes: Sequence[Node]) -> None:
        """Forget the nodes that are not among Ray's living ``nodes``, because Ray starts nothing there."""
        self.ids &= {node.node_id for node in nodes}

    def record_death(self, info: WorkerInfo) -> bool:
        """Count a worker's death on a living node; return whether the node is faulty now, for `avoid_faulty` to decide."""
        node_id, now = info.node_id, self._clock()
        is_new = now - self._last_death.get(node_id, -SAME_DEATH_S) >= SAME_DEATH_S
        self._last_death[node_id] = now
        self._deaths[node_id] += is_new
        return node_id not in self.ids and self._is_faulty(node_id)

    def avoid_faulty(self, info: WorkerInfo, nodes: Sequence[Node]) -> None:
        """Avoid a worker's node, because it is faulty, if another one of ``nodes`` has room for a worker."""
        if self._has_room_elsewhere(info.node_id, nodes):
            self.ids.add(info.node_id)
            self._warnings.append(
                f"{info.node} is not used any more: workers have died there {self._deaths[info.node_id]} times, "
                "and less often on every other node"
            )

    def take_warnings(self) -> list[str]:
        """Return a line for each node that was found faulty since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _is_faulty(self, node_id: str) -> bool:
        others = max((count for other, count in self._deaths.items() if other != node_id), default=0)
        return self._deaths[node_id] >= max(MIN_DEATHS, others + 2)

    def _has_room_elsewhere(self, node_id: str, nodes: Sequence[Node]) -> bool:
        others = [node for node in nodes if node.node_id not in {node_id, *self.ids}]
        return count_fitting(self._bundle, others) > 0
