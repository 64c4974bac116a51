"""The vital signs of a group's members: what they answer, and what their nodes see of them. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from raysgd.backends.flight_record import Collective
from raysgd.session.progress import Pulse
from raysgd.workers.agent import ProcessLook
from raysgd.workers.agents import Agents, Unreachable
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.process import Worker


class Vitals:
    """Asks members and their nodes.

    Args:
        members: Gives the members by rank; None for one that has no process.
    """

    def __init__(self, agents: Agents, members: Callable[[], Sequence[Worker | None]]) -> None:
        self._agents = agents
        self._members = members

    @property
    def size(self) -> int:
        return len(self._members())

    async def pulse(self, rank: int) -> Pulse | None:
        """How a member says it is; waits for as long as it says nothing. None for one that is dead."""
        worker = self._members()[rank]
        if worker is None:
            return None
        try:
            pulse: Pulse = await worker.handle.pulse.remote()
        except RayError:
            return None
        return pulse

    async def look(self, ranks: Sequence[int], timeout_s: float) -> dict[int, ProcessLook | None]:
        """How the processes of members stand, as their nodes see them: None for those that are gone.

        Left out are the ranks whose nodes give no answer within the time.
        """

        async def on_node(node_id: str, here: dict[int, WorkerInfo]) -> dict[int, ProcessLook | None]:
            try:
                looks = await self._agents.look(node_id, [info.pid for info in here.values()], timeout_s)
            except Unreachable:
                return {}
            return dict(zip(here, looks, strict=True))

        return _merge(await asyncio.gather(*[on_node(*node) for node in self._by_node(ranks).items()]))

    async def stacks(self, timeout_s: float) -> dict[int, str]:
        """Where the process of each member stands, as far as its node can tell within the time."""

        async def on_node(node_id: str, here: dict[int, WorkerInfo]) -> dict[int, str]:
            processes = [(info.pid, info.stacks_file) for info in here.values()]
            try:
                return dict(zip(here, await self._agents.stacks(node_id, processes, timeout_s), strict=True))
            except Unreachable:
                return dict.fromkeys(here, "its node gives no answer")

        ranks = range(self.size)
        return _merge(await asyncio.gather(*[on_node(*node) for node in self._by_node(ranks).items()]))

    async def collectives(self, ranks: Sequence[int], folder: str, timeout_s: float) -> dict[int, Sequence[Collective]]:
        """The last collectives of those ranks that answer within the time; they write what they know into ``folder``."""
        members = {rank: worker for rank in ranks if (worker := self._members()[rank]) is not None}
        asked = {rank: asyncio.ensure_future(w.handle.flight_record.remote(folder)) for rank, w in members.items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout_s)
        for answer in asked.values():
            answer.cancel()
        done = {rank: answer for rank, answer in asked.items() if answer.done() and not answer.cancelled()}
        return {rank: answer.result() for rank, answer in done.items() if answer.exception() is None}

    def _by_node(self, ranks: Sequence[int]) -> dict[str, dict[int, WorkerInfo]]:
        """Members by node and rank."""
        found: dict[str, dict[int, WorkerInfo]] = {}
        for rank in ranks:
            worker = self._members()[rank]
            if worker is not None and worker.info is not None:
                found.setdefault(worker.info.node_id, {})[rank] = worker.info
        return found


def _merge(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    return {rank: value for part in parts for rank, value in part.items()}
