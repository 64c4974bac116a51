"""Nodes on which workers die again and again. Runs in the TrainerActor; pure but for what it is given."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement import Node, room_for

#: Deaths on one node that make it faulty, if on no other node as many have died but for one.
MANY = 2
#: Seconds in which deaths on a node are one.
TOGETHER_S = 5.0


class FaultyNodes:
    """Counts the deaths on each node, over all runs of a group.

    Args:
        avoid: Nodes to put no process on; faulty ones are added, while there is room for a worker elsewhere.
        bundle: A worker's resources.
        nodes: Gives the cluster's nodes, and what is free on them.
        clock: Seconds, from any moment on.
    """

    def __init__(
        self,
        avoid: set[str],
        bundle: Mapping[str, float],
        nodes: Callable[[], Sequence[Node]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._avoid = avoid
        self._bundle = bundle
        self._nodes = nodes
        self._clock = clock
        self._deaths: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        self._told: list[str] = []

    def died(self, info: WorkerInfo) -> None:
        """A worker has died, and its node has not."""
        node_id, now = info.node_id, self._clock()
        is_same = now - self._last.get(node_id, -TOGETHER_S) < TOGETHER_S
        self._last[node_id] = now
        self._deaths[node_id] += not is_same
        if node_id not in self._avoid and self._is_faulty(node_id) and self._has_room_elsewhere(node_id):
            self._avoid.add(node_id)
            self._told.append(
                f"{info.node} is used no more: workers have died there {self._deaths[node_id]} times, and not elsewhere"
            )

    def take_told(self) -> list[str]:
        """A line on each node that has been found faulty since the last call."""
        told, self._told = self._told, []
        return told

    def _is_faulty(self, node_id: str) -> bool:
        others = max((count for other, count in self._deaths.items() if other != node_id), default=0)
        return self._deaths[node_id] >= max(MANY, others + 2)

    def _has_room_elsewhere(self, node_id: str) -> bool:
        return room_for(self._bundle, [n for n in self._nodes() if n.node_id not in {node_id, *self._avoid}]) > 0
