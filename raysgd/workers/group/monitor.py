"""Observes the members of a group: their heartbeats, processes, stacks and collectives, and draining nodes.

Runs in the TrainerActor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from ray.exceptions import RayError, RayTaskError

from raysgd._util.logs import get_logger
from raysgd.backends.flight_recorder import Collective, CollectiveId
from raysgd.session.progress import Heartbeat, NodeClock
from raysgd.workers.group.joining import JoiningWorkers
from raysgd.workers.group.processes import Worker
from raysgd.workers.liveness.node_agent import NodeAgents, NodeUnreachableError, ProcessStatus
from raysgd.workers.orders import Position, WorkerInfo
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.calls import call_cluster
from raysgd.workers.placement.cluster import list_draining_nodes, list_nodes

T = TypeVar("T")

#: Seconds between two questions to the agent of a lost node, and the time for its answer.
ASK_LOST_S = 1.0


class GroupMonitor:
    """Asks the members, and the agents of their nodes, for their state.

    Args:
        members: By rank; None for a rank without a process. The group changes this list.
    """

    def __init__(self, agents: NodeAgents, members: Sequence[Worker | None]) -> None:
        self._agents = agents
        self._members = members
        self._has_logged = False  # that a member has failed to answer
        self._clocks: dict[str, NodeClock] = {}  # by node id

    @property
    def size(self) -> int:
        return len(self._members)

    async def heartbeat(self, rank: int) -> Heartbeat | None:
        """Wait for the next heartbeat of a member, however long it takes; None if the member is dead."""
        if (worker := self._members[rank]) is None:
            return None
        node_id = "" if worker.info is None else worker.info.node_id
        asked_s = time.time()
        try:
            heartbeat: Heartbeat = await worker.handle.heartbeat.remote(self._clock_of(node_id))
        except RayError:
            return None
        if heartbeat.clock_s:
            self._clocks[node_id] = NodeClock.best(self._clocks.get(node_id), asked_s, time.time(), heartbeat.clock_s)
        return heartbeat

    def _clock_of(self, node_id: str) -> NodeClock | None:
        now_s = time.monotonic()
        is_own = node_id == self._agents.own_node
        return NodeClock(time.time() - now_s, 0.0, now_s) if is_own else self._clocks.get(node_id)

    async def check_processes(self, ranks: Sequence[int], timeout_s: float) -> dict[int, ProcessStatus | None]:
        """Return the state of members' processes as their nodes see them; None for processes that are gone.

        Ranks whose nodes do not answer in time are left out.
        """
        return await self._ask_nodes(
            ranks,
            lambda node_id, infos: self._agents.check_processes(node_id, [info.pid for info in infos], timeout_s),
        )

    async def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return the stacks of each member's process, or why they cannot be read within the time."""
        ranks = [rank for rank, worker in enumerate(self._members) if worker is not None and worker.info is not None]
        stacks = await self._ask_nodes(
            ranks,
            lambda node_id, infos: self._agents.stacks(node_id, [(i.pid, i.stacks_file) for i in infos], timeout_s),
        )
        return {rank: stacks.get(rank, "its node does not answer") for rank in ranks}

    async def collectives(self, ranks: Sequence[int], folder: str, timeout_s: float) -> dict[int, Sequence[Collective]]:
        """Return the last collectives of the ranks that answer in time; they write their full records into ``folder``."""
        return await self._ask_members(ranks, lambda _, worker: worker.handle.flight_record.remote(folder), timeout_s)

    async def positions(self, asked: Mapping[int, Collection[CollectiveId]], timeout_s: float) -> dict[int, Position]:
        """Return where train_func is on the ranks that answer in time.

        Args:
            asked: For each rank the collectives that others wait in, of which it says whether it has begun them.
            timeout_s: The time to answer.
        """
        return await self._ask_members(
            range(self.size), lambda rank, worker: worker.handle.position.remote(asked.get(rank, ())), timeout_s
        )

    async def _ask_members(
        self, ranks: Iterable[int], ask: Callable[[int, Worker], Awaitable[T]], timeout_s: float
    ) -> dict[int, T]:
        """Call ``ask`` with each rank and its worker; return the answers of those that answer in time."""
        members = {rank: worker for rank in ranks if (worker := self._members[rank]) is not None}
        calls = {rank: asyncio.ensure_future(ask(rank, worker)) for rank, worker in members.items()}
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
        for call in calls.values():
            call.cancel()
        done = {rank: call for rank, call in calls.items() if call.done() and not call.cancelled()}
        for rank, call in done.items():
            if isinstance(error := call.exception(), RayTaskError) and not self._has_logged:
                self._has_logged = True
                get_logger().error("rank %d cannot be observed, so that a hang of it may not be found: %s", rank, error)
        return {rank: call.result() for rank, call in done.items() if call.exception() is None}

    async def _ask_nodes(
        self, ranks: Sequence[int], ask: Callable[[str, Sequence[WorkerInfo]], Awaitable[Sequence[T]]]
    ) -> dict[int, T]:
        """Call ``ask`` for each node with its workers; return the answers by rank, without nodes that do not answer."""
        by_node: dict[str, dict[int, WorkerInfo]] = {}
        for rank in ranks:
            worker = self._members[rank]
            if worker is not None and worker.info is not None:
                by_node.setdefault(worker.info.node_id, {})[rank] = worker.info

        async def ask_node(node_id: str, infos: Mapping[int, WorkerInfo]) -> dict[int, T]:
            try:
                return dict(zip(infos, await ask(node_id, list(infos.values())), strict=True))
            except NodeUnreachableError:
                return {}

        answers = await asyncio.gather(*[ask_node(*node) for node in by_node.items()])
        return {rank: answer for by_rank in answers for rank, answer in by_rank.items()}


class DrainMonitor:
    """Finds the members on nodes that Ray is about to take away.

    Args:
        members: By rank; None for a rank without a process. The group changes this list.
        joining: Those on draining nodes are ended. Spares there are not used, see `Reserve.take`.
        avoided: Draining nodes are added.
    """

    def __init__(self, members: Sequence[Worker | None], joining: JoiningWorkers, avoided: AvoidedNodes) -> None:
        self._members = members
        self._joining = joining
        self._avoided = avoided

    async def ranks(self) -> dict[int, float | None]:
        """Return the ranks on draining nodes, each with the seconds that are left or None if unknown."""
        draining = await asyncio.to_thread(list_draining_nodes)
        self._avoided.drain(draining)
        self._joining.drop_on(draining)
        nodes = {rank: worker.info.node_id for rank, worker in enumerate(self._members) if worker and worker.info}
        return {rank: draining[node_id] for rank, node_id in nodes.items() if node_id in draining}


class LostNodes:
    """Asks the agents of lost nodes, until each node counts again or is no longer in the cluster.

    Args:
        avoided: The lost nodes; it decides when they count again.
    """

    def __init__(self, agents: NodeAgents, avoided: AvoidedNodes) -> None:
        self._agents = agents
        self._avoided = avoided
        self._asking: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Ask from now on; returns at once."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask_regularly())

    def close(self) -> None:
        """Stop asking."""
        for task in (self._asking, self._listing):
            if task is not None:
                task.cancel()

    async def _ask_regularly(self) -> None:
        while lost := self._avoided.lost:
            # One call at a time: it waits for as long as the GCS is away.
            if self._listing is None or self._listing.done():
                self._listing = asyncio.get_running_loop().create_task(self._remove_gone())
            await asyncio.gather(*[self._ask(node_id) for node_id in lost])
            await asyncio.sleep(ASK_LOST_S)

    async def _ask(self, node_id: str) -> None:
        self._avoided.on_asked(node_id, answers=await self._agents.answers(node_id, ASK_LOST_S))

    async def _remove_gone(self) -> None:
        with contextlib.suppress(RayError):
            self._avoided.remove_gone(await call_cluster(list_nodes))
