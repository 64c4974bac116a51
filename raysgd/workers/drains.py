"""Nodes that Ray is about to take away, and the members that are on them. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from raysgd.workers.cluster import draining_nodes
from raysgd.workers.process import Worker
from raysgd.workers.reserve import Reserve


class Drains:
    """Of one group.

    Args:
        members: Gives the members by rank; None for one that has no process.
        avoid: Nodes to put no process on; draining ones are added.
    """

    def __init__(self, members: Callable[[], Sequence[Worker | None]], reserve: Reserve, avoid: set[str]) -> None:
        self._members = members
        self._reserve = reserve
        self._avoid = avoid

    async def ranks(self) -> dict[int, float | None]:
        """The ranks on draining nodes, each with the seconds that are left, where that is known."""
        found = await asyncio.to_thread(draining_nodes)
        self._avoid.update(found)
        if found:
            self._reserve.leave(found)
        on_nodes = {rank: worker.info.node_id for rank, worker in enumerate(self._members()) if worker and worker.info}
        return {rank: found[node_id] for rank, node_id in on_nodes.items() if node_id in found}
