"""The group's checkpoints in the cluster's memory.

Runs in the TrainerActor, which holds references to payloads and never fetches them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from raysgd.errors import WorkerError
from raysgd.workers.group.processes import Worker
from raysgd.workers.liveness.node_agent import NodeAgents

if TYPE_CHECKING:
    from raysgd.checkpoint.storage.names import FileEntry

#: The number of payloads that a worker's stream may be ahead of the reader.
_STREAM_AHEAD = 2


class ClusterMemory:
    """Access to the checkpoints of one group in the cluster's memory.

    Args:
        members: By rank; None for a rank without a process. The group changes this list.
    """

    def __init__(self, agents: NodeAgents, members: Sequence[Worker | None]) -> None:
        self._agents = agents
        self._members = members

    async def payloads(self, rank: int, attempt: int) -> AsyncIterator[Any]:
        """Yield references to what a rank saves in an attempt, in order, until the attempt or the process ends."""
        if (worker := self._members[rank]) is None:
            return
        stream = worker.handle.payloads.options(
            num_returns="streaming", _generator_backpressure_num_objects=_STREAM_AHEAD
        ).remote(attempt)
        with contextlib.suppress(RayError):  # the process died; what it saved before has been yielded
            async for ref in stream:
                yield ref

    async def reach(self, needed: Callable[[int], Mapping[int, Any]], *, timeout_s: float) -> bool:
        """Fetch the parts of a checkpoint that each member needs to its node; return True if all of them arrived.

        Args:
            needed: Returns the parts that a rank loads, by the rank that saved them.
            timeout_s: The time for all parts together.
        """
        answers = []
        for rank, worker in enumerate(self._members):
            if worker is not None:
                parts = list(needed(rank).values())
                answers.append(asyncio.ensure_future(worker.handle.reach.remote(parts, timeout_s)))
        try:
            return all(await asyncio.wait_for(asyncio.gather(*answers), 2 * timeout_s))
        except (RayError, asyncio.TimeoutError):
            return False

    async def store(self, rank: int, part: Any, folder: str, prefix: str) -> list[FileEntry]:
        """Write a part to a folder on storage, in the worker that saved it if it lives, else in another one.

        Raises:
            WorkerError: There is no living worker.
            Exception: The part could not be written.
        """
        by_preference = (*self._members[rank : rank + 1], *self._members)
        loaded = [worker for worker in by_preference if worker is not None and worker.is_loaded]
        if not loaded:
            raise WorkerError("no worker process is left to write the checkpoint")
        return list(await loaded[0].handle.store.remote([part], folder, prefix))

    def copy(self, checkpoints: Sequence[Mapping[int, Any]]) -> None:
        """Keep a copy of each part on a second node, if there is one, instead of the copies kept so far.

        Args:
            checkpoints: The parts of each checkpoint by the rank that saved them.
        """
        infos = {rank: worker.info for rank, worker in enumerate(self._members) if worker is not None}
        self._agents.keep_copies(
            [
                (info.node_id, parts[rank])
                for parts in checkpoints
                for rank, info in infos.items()
                if info and rank in parts
            ]
        )
