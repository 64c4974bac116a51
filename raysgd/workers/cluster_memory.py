"""The group's checkpoints in the cluster's memory: where they come from, who can read them. Runs in the TrainerActor.

It holds references and never fetches what they stand for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from raysgd.errors import WorkerError
from raysgd.workers.agents import Agents
from raysgd.workers.process import Worker

if TYPE_CHECKING:
    from raysgd.checkpoint.names import FileEntry

#: Payloads that a worker's stream may be ahead of their being taken.
_STREAM_AHEAD = 2


class ClusterMemory:
    """Of one group.

    Args:
        members: Gives the members by rank; None for one that has no process.
    """

    def __init__(self, agents: Agents, members: Callable[[], Sequence[Worker | None]]) -> None:
        self._agents = agents
        self._members = members

    async def payloads(self, rank: int, attempt: int) -> AsyncIterator[Any]:
        """References to what a rank saves in an attempt, in order; ends with the attempt, or the process."""
        worker = self._members()[rank]
        if worker is None:
            return
        stream = worker.handle.payloads.options(
            num_returns="streaming", _generator_backpressure_num_objects=_STREAM_AHEAD
        ).remote(attempt)
        with contextlib.suppress(RayError):  # what it saved until then is here
            async for ref in stream:
                yield ref

    async def reach(self, needed: Callable[[int], Mapping[int, Any]], *, timeout_s: float) -> bool:
        """Whether every member has what it needs of a checkpoint, or can fetch it, which is done.

        Args:
            needed: The parts that a rank loads, by the rank that saved them.
            timeout_s: For them all.
        """
        answers = []
        for rank, worker in enumerate(self._members()):
            if worker is not None:
                parts = list(needed(rank).values())
                answers.append(asyncio.ensure_future(worker.handle.reach.remote(parts, timeout_s)))
        try:
            return all(await asyncio.wait_for(asyncio.gather(*answers), 2 * timeout_s))
        except (RayError, asyncio.TimeoutError):
            return False

    async def store(self, rank: int, part: Any, folder: str, prefix: str) -> list[FileEntry]:
        """Have a part written to a folder on storage, by the rank that saved it if it lives, else by another.

        Raises:
            WorkerError: There is none.
            Exception: It could not be written.
        """
        members = self._members()
        able = [worker for worker in (*members[rank : rank + 1], *members) if worker is not None and worker.is_loaded]
        if not able:
            raise WorkerError("no worker process is left to write it")
        return list(await able[0].handle.store.remote([part], folder, prefix))

    def copy(self, parts: Mapping[int, Any]) -> None:
        """Have a second node hold each part, where there is one; those held so far are let go.

        Args:
            parts: By the rank that saved them.
        """
        infos = {rank: worker.info for rank, worker in enumerate(self._members()) if worker is not None}
        self._agents.hold([(info.node_id, parts[rank]) for rank, info in infos.items() if info and rank in parts])
