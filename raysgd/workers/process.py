"""A worker's process as the controller sees it, and how one is started. Runs in the TrainerActor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raysgd.backends.base import BackendConfig, Member
from raysgd.config import ScalingConfig
from raysgd.session.base import Identity
from raysgd.workers.actor import NUM_THREADS, WorkerActor
from raysgd.workers.cluster import NAMESPACE
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.seats import Seat


@dataclass(eq=False)
class Worker:
    """One process and its seat.

    Attributes:
        loading: The answer of its first call, the import of the framework.
        info: Where it is, once it has said so.
        identity: Its place in the group, once that is complete.
        has_joined: It was told to join a group.
        is_parked: train_func is inside, and goes on in the next attempt.
    """

    seat: Seat
    handle: Any
    loading: Any
    is_loaded: bool = False
    info: WorkerInfo | None = None
    identity: Identity | None = None
    has_joined: bool = False
    is_parked: bool = False

    @property
    def node(self) -> str:
        return "an unknown node" if self.info is None else self.info.node

    async def locate(self) -> None:
        """Wait until it says where it is."""
        self.info = await self.handle.describe.remote()

    async def bring_up(self) -> str | None:
        """Wait until it serves; what is wrong where it cannot."""
        await self.locate()
        problem: str | None = await self.loading
        self.is_loaded = problem is None
        return problem

    def as_member(self, rank: int, rendezvous: str, gpus: float) -> Member:
        """What it is told of its place in the group it is to join now; ``gpus``: how many each worker has."""
        assert self.info is not None and self.identity is not None
        self.has_joined = True
        return Member(
            rank=rank,
            world_size=self.identity.world_size,
            local_rank=self.identity.local_rank,
            local_world_size=self.identity.local_world_size,
            node_rank=self.identity.node_rank,
            rendezvous=rendezvous,
            node_ip=self.info.node_ip,
            has_gpu=gpus > 0,
            shares_gpu=0 < gpus < 1,
        )


class WorkerStarter:
    """Starts processes, each of which begins at once to import the framework.

    Args:
        name: Begins the names of the actors.
        runtime_env: Ray runtime environment of the processes.
        controller: Name of the TrainerActor.
    """

    def __init__(
        self,
        name: str,
        scaling: ScalingConfig,
        backend: BackendConfig,
        runtime_env: Mapping[str, Any] | None,
        controller: str,
    ) -> None:
        self._name = name
        self._scaling = scaling
        self._backend = backend
        self._runtime_env = dict(runtime_env or {})
        self._controller = controller
        self._num_started = 0

    def start(self, seat: Seat, *, warm_up: bool = False) -> Worker:
        """A process in ``seat``; it comes up when the seat's resources are there. ``warm_up``: it is not needed at once."""
        self._num_started += 1
        handle: Any = (
            ray.remote(WorkerActor)
            .options(
                name=f"{self._name}-worker-{self._num_started}",
                namespace=NAMESPACE,
                num_cpus=self._scaling.cpus_per_worker,
                num_gpus=self._scaling.gpus_per_worker,
                resources=dict(self._scaling.resources_per_worker) or None,
                scheduling_strategy=seat.strategy(),
                max_concurrency=NUM_THREADS,
                runtime_env=self._runtime_env or None,
            )
            .remote()
        )
        return Worker(seat, handle, handle.load.remote(self._backend, self._controller, warm_up))


def mark_parked(members: Sequence[Worker | None], ranks: Collection[int] | None) -> None:
    """Note the members whose train_func is inside and goes on in the next attempt; None: they are known."""
    for rank, worker in enumerate(members):
        if worker is not None and ranks is not None:
            worker.is_parked = rank in ranks
