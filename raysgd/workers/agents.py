"""The agents of the nodes that have workers. Runs in the TrainerActor, which is the agent of its own node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.workers.agent import NodeAgent, ProcessLook
from raysgd.workers.cluster import NAMESPACE, node_answers
from raysgd.workers.deaths import death_reason, may_be_memory
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.out_of_memory import MemoryEvidence

#: Seconds a node has to tell what it knows of a worker that has died, while what the worker had sent is still read.
_MEMORY_TIMEOUT_S = 0.2


class Unreachable(Exception):
    """A node's agent gives no answer."""


class Agents:
    """One agent a node.

    Args:
        name: Begins the names of the actors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._here = ray.get_runtime_context().get_node_id()
        self._own = NodeAgent()
        self._actors: dict[str, Any] = {}

    def settle(self, workers: Iterable[WorkerInfo]) -> None:
        """Have an agent on each node of these workers, that looks at their memory; returns at once."""
        pids: dict[str, list[int]] = {}
        for info in workers:
            pids.setdefault(info.node_id, []).append(info.pid)
        for node_id, here in pids.items():
            if node_id == self._here:
                self._own.watch_memory(here)
                continue
            if node_id not in self._actors:
                self._actors[node_id] = (
                    ray.remote(NodeAgent)
                    .options(
                        name=f"{self._name}-agent-{node_id[:12]}",
                        namespace=NAMESPACE,
                        num_cpus=0,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                    )
                    .remote()
                )
            self._actors[node_id].watch_memory.remote(here)

    async def look(self, node_id: str, pids: Sequence[int], timeout_s: float) -> list[ProcessLook | None]:
        """How processes of a node stand; None for those that are gone.

        Raises:
            Unreachable: No answer within the time.
        """
        if node_id == self._here:
            return self._own.look(pids)
        looks: list[ProcessLook | None] = await self._ask(node_id, "look", list(pids), timeout_s)
        return looks

    async def stacks(self, node_id: str, processes: Sequence[tuple[int, int]], timeout_s: float) -> list[str]:
        """Where processes of a node stand, each given by its id and the descriptor of its stacks.

        Raises:
            Unreachable: No answer within the time.
        """
        if node_id == self._here:
            return await asyncio.to_thread(self._own.stacks, processes)
        stacks: list[str] = await self._ask(node_id, "stacks", list(processes), timeout_s)
        return stacks

    def hold(self, parts: Sequence[tuple[str, Any]]) -> None:
        """Have each part of a checkpoint on a second node that has an agent, instead of those held before.

        Args:
            parts: With the node that each is on.
        """
        places = [self._here, *self._actors]
        held: dict[str, list[Any]] = {node_id: [] for node_id in places}
        for node_id, part in parts:
            if other := next((place for place in places if place != node_id), None):
                held[other].append(part)
        self._own.hold(held.pop(self._here))
        for node_id, here in held.items():
            self._actors[node_id].hold.remote(here)

    def kill(self, info: WorkerInfo) -> None:
        """End a process where it is; returns at once."""
        if info.node_id == self._here:
            self._own.kill(info.pid)
        elif info.node_id in self._actors:
            self._actors[info.node_id].kill.remote(info.pid)

    async def why_died(self, error: BaseException, info: WorkerInfo | None) -> str:
        """What Ray says of a death, and whether memory was the cause, where that may be so."""
        memory = await self._memory(info) if info is not None and may_be_memory(error) else None
        return death_reason(error, memory)

    async def is_node_gone(self, info: WorkerInfo | None) -> bool:
        """Whether the node of a worker that has died is gone as well."""
        if info is None or info.node_id == self._here:
            return False
        return not await asyncio.to_thread(node_answers, info.node_id)

    def close(self) -> None:
        """End the actors."""
        self._own.close()
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    async def _memory(self, info: WorkerInfo) -> MemoryEvidence | None:
        if info.node_id == self._here:
            return self._own.memory(info.pid)
        try:
            known: MemoryEvidence | None = await self._ask(info.node_id, "memory", info.pid, _MEMORY_TIMEOUT_S)
        except Unreachable:
            return None
        return known

    async def _ask(self, node_id: str, method: str, given: Any, timeout_s: float) -> Any:
        actor = self._actors.get(node_id)
        if actor is None:
            raise Unreachable(node_id)
        try:
            return await asyncio.wait_for(getattr(actor, method).remote(given), timeout_s)
        except (RayError, asyncio.TimeoutError) as error:
            raise Unreachable(node_id) from error
