"""The mechanism alone, in plain Ray: a driver, one controller actor, and two workers that form a gloo group and call a function.

Streaming generators return what the workers yield. Nothing can start such a chain faster.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bench.systems.base import RaySystem, TrainFunc
from bench.worker import NUM_WORKERS


class Worker:
    """A process with torch."""

    def load(self) -> str:
        import torch.distributed  # noqa: F401

        return ray.util.get_node_ip_address()

    def run(self, rank: int, host: str, port: int, train_func: TrainFunc, config: dict[str, Any]) -> Iterator[Any]:
        import torch.distributed as dist

        store = dist.TCPStore(host, port, world_size=NUM_WORKERS, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS)
        yield train_func(config)
        dist.destroy_process_group()


class Controller:
    """An async actor without a CPU that starts the workers and yields what they yield."""

    async def run(self, port: int, train_func: TrainFunc, config: dict[str, Any]) -> AsyncIterator[Any]:
        placement = placement_group([{"CPU": 1}] * NUM_WORKERS, strategy="PACK")
        workers = [
            ray.remote(Worker)
            .options(
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index),
            )
            .remote()
            for index in range(NUM_WORKERS)
        ]
        hosts = await asyncio.gather(*[worker.load.remote() for worker in workers])
        streams = [
            worker.run.options(num_returns="streaming").remote(rank, hosts[0], port, train_func, config)
            for rank, worker in enumerate(workers)
        ]
        for stream in streams:
            async for ref in stream:
                yield await ref
        for worker in workers:
            ray.kill(worker)
        remove_placement_group(placement)


class BareSystem(RaySystem):
    """Bare actors, without reports and checkpoints."""

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        port, full = free_port(), self._full(config)
        self.called = time.time()
        controller = ray.remote(Controller).options(num_cpus=0).remote()
        for ref in controller.run.options(num_returns="streaming").remote(port, train_func, full):
            ray.get(ref)
        ray.kill(controller)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ray.util.get_node_ip_address(), 0))
        return int(probe.getsockname()[1])
