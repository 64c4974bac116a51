"""Observes the members of a group: their heartbeats, processes, stacks and collectives, and draining nodes.

Runs in the TrainerActor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from raysgd.backends.flight_recorder import Collective
from raysgd.session.progress import Heartbeat
from raysgd.workers.group.processes import Worker
from raysgd.workers.group.reserve import Reserve
from raysgd.workers.liveness.node_agent import NodeAgents, NodeUnreachableError, ProcessStatus
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.cluster import list_draining_nodes


class GroupMonitor:
    """Asks members, and the agents of their nodes, how they are.

    Args:
        members: Returns the members by rank; None for a rank without a process.
    """

    def __init__(self, agents: NodeAgents, members: Callable[[], Sequence[Worker | None]]) -> None:
        self._agents = agents
        self._members = members

    @property
    def size(self) -> int:
        return len(self._members())

    async def heartbeat(self, rank: int) -> Heartbeat | None:
        """Wait for the next heartbeat of a member, however long it takes; None if the member is dead."""
        worker = self._members()[rank]
        if worker is None:
            return None
        try:
            heartbeat: Heartbeat = await worker.handle.heartbeat.remote()
        except RayError:
            return None
        return heartbeat

    async def check_processes(self, ranks: Sequence[int], timeout_s: float) -> dict[int, ProcessStatus | None]:
        """Return the state of members' processes as their nodes see them; None for processes that are gone.

        Ranks whose nodes do not answer in time are left out.
        """

        async def on_node(node_id: str, infos: dict[int, WorkerInfo]) -> dict[int, ProcessStatus | None]:
            try:
                pids = [info.pid for info in infos.values()]
                statuses = await self._agents.check_processes(node_id, pids, timeout_s)
            except NodeUnreachableError:
                return {}
            return dict(zip(infos, statuses, strict=True))

        return _merge(await asyncio.gather(*[on_node(*node) for node in self._by_node(ranks).items()]))

    async def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return the stacks of each member's process, as far as its node can read them within the time."""

        async def on_node(node_id: str, infos: dict[int, WorkerInfo]) -> dict[int, str]:
            processes = [(info.pid, info.stacks_file) for info in infos.values()]
            try:
                return dict(zip(infos, await self._agents.stacks(node_id, processes, timeout_s), strict=True))
            except NodeUnreachableError:
                return dict.fromkeys(infos, "its node does not answer")

        ranks = range(self.size)
        return _merge(await asyncio.gather(*[on_node(*node) for node in self._by_node(ranks).items()]))

    async def collectives(self, ranks: Sequence[int], folder: str, timeout_s: float) -> dict[int, Sequence[Collective]]:
        """Return the last collectives of the ranks that answer in time; they write their full records into ``folder``."""
        members = {rank: worker for rank in ranks if (worker := self._members()[rank]) is not None}
        calls = {rank: asyncio.ensure_future(w.handle.flight_record.remote(folder)) for rank, w in members.items()}
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
        for call in calls.values():
            call.cancel()
        done = {rank: call for rank, call in calls.items() if call.done() and not call.cancelled()}
        return {rank: call.result() for rank, call in done.items() if call.exception() is None}

    def _by_node(self, ranks: Sequence[int]) -> dict[str, dict[int, WorkerInfo]]:
        by_node: dict[str, dict[int, WorkerInfo]] = {}
        for rank in ranks:
            worker = self._members()[rank]
            if worker is not None and worker.info is not None:
                by_node.setdefault(worker.info.node_id, {})[rank] = worker.info
        return by_node


class DrainMonitor:
    """Finds the members on nodes that Ray is about to take away.

    Args:
        members: Returns the members by rank; None for a rank without a process.
        avoided: Nodes to start no process on; draining nodes are added.
    """

    def __init__(self, members: Callable[[], Sequence[Worker | None]], reserve: Reserve, avoided: AvoidedNodes) -> None:
        self._members = members
        self._reserve = reserve
        self._avoided = avoided

    async def ranks(self) -> dict[int, float | None]:
        """Return the ranks on draining nodes, each with the seconds that are left or None if unknown."""
        draining = await asyncio.to_thread(list_draining_nodes)
        self._avoided.add(draining)
        if draining:
            self._reserve.leave_nodes(draining)
        nodes = {rank: worker.info.node_id for rank, worker in enumerate(self._members()) if worker and worker.info}
        return {rank: draining[node_id] for rank, node_id in nodes.items() if node_id in draining}


def _merge(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    return {rank: value for part in parts for rank, value in part.items()}
