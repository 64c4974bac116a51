"""The group's checkpoints in the cluster's memory, and the check that all workers see the run's storage.

Runs in the TrainerActor, which holds references to payloads and never fetches them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raysgd.errors import ConfigError, WorkerError
from raysgd.workers.group.processes import Worker
from raysgd.workers.liveness.node_agent import NodeAgents

if TYPE_CHECKING:
    from raysgd.checkpoint.storage.names import FileEntry
    from raysgd.checkpoint.storage.storage import Storage

#: The number of payloads that a worker's stream may be ahead of the reader.
_STREAM_AHEAD = 2


class ClusterMemory:
    """Access to the checkpoints of one group in the cluster's memory.

    Args:
        members: Returns the members by rank; None for a rank without a process.
    """

    def __init__(self, agents: NodeAgents, members: Callable[[], Sequence[Worker | None]]) -> None:
        self._agents = agents
        self._members = members

    async def payloads(self, rank: int, attempt: int) -> AsyncIterator[Any]:
        """Yield references to what a rank saves in an attempt, in order, until the attempt or the process ends."""
        worker = self._members()[rank]
        if worker is None:
            return
        stream = worker.handle.payloads.options(
            num_returns="streaming", _generator_backpressure_num_objects=_STREAM_AHEAD
        ).remote(attempt)
        with contextlib.suppress(RayError):  # the process died; what it saved before has been yielded
            async for ref in stream:
                yield ref

    async def reach(self, needed: Callable[[int], Mapping[int, Any]], *, timeout_s: float) -> bool:
        """Fetch to every member the parts of a checkpoint that it needs; return whether all could.

        Args:
            needed: Returns the parts that a rank loads, by the rank that saved them.
            timeout_s: The time for all parts together.
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
        """Write a part to a folder on storage, in the rank that saved it if it lives, else in another one.

        Raises:
            WorkerError: There is no living worker.
            Exception: The part could not be written.
        """
        members = self._members()
        loaded = [worker for worker in (*members[rank : rank + 1], *members) if worker is not None and worker.is_loaded]
        if not loaded:
            raise WorkerError("no worker process is left to write the checkpoint")
        return list(await loaded[0].handle.store.remote([part], folder, prefix))

    def copy(self, parts: Mapping[int, Any]) -> None:
        """Keep a copy of each part on a second node, if there is one, instead of the copies kept so far.

        Args:
            parts: The parts by the rank that saved them.
        """
        infos = {rank: worker.info for rank, worker in enumerate(self._members()) if worker is not None}
        self._agents.keep_copies(
            [(info.node_id, parts[rank]) for rank, info in infos.items() if info and rank in parts]
        )


async def check_storage(
    storage: Storage,
    workers: Sequence[Worker],
    gather: Callable[[Sequence[Worker], Sequence[Any]], Awaitable[list[Any]]],
) -> None:
    """Check that one worker on each other node sees a probe file, if the run's folder is a local path.

    Args:
        storage: The run's folder.
        workers: All workers.
        gather: Waits for answers of workers.

    Raises:
        ConfigError: A node does not see the folder.
    """
    own_node = ray.get_runtime_context().get_node_id()
    others = {w.info.node_id: w for w in workers if w.info is not None and w.info.node_id != own_node}
    if not storage.is_local or not others:
        return
    storage.write_bytes("probe", b"")
    probes = [worker.handle.probe.remote(storage.uri, "probe") for worker in others.values()]
    seen = await gather(list(others.values()), probes)
    storage.delete_file("probe")
    blind = [worker.node for worker, sees in zip(others.values(), seen, strict=True) if not sees]
    if blind:
        raise ConfigError(
            f"storage_path {storage.uri} is on one node's disk: {', '.join(blind)} cannot see it. "
            "Give RunConfig(storage_path=...) a folder all nodes share, or a URI such as s3://bucket/folder."
        )
