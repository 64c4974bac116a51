"""Computes which worker gets which rank, sees which GPUs, and opens the rendezvous where. Pure."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from raysgd.backends.addresses import loopback_of
from raysgd.backends.base import BackendConfig, Member
from raysgd.workers.orders import GpuId, WorkerInfo

T = TypeVar("T")


def assign_ranks(nodes: Sequence[str]) -> list[int]:
    """Order workers by rank, so that the workers of a node are next to each other.

    Args:
        nodes: The node of each worker, in the order of the placement group's bundles. The node of the first worker comes
            first, so that rank 0 stays where the group begins.

    Returns:
        Indices of ``nodes``, by rank.
    """
    order = {node: place for place, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda index: (order[nodes[index]], index))


def close_gaps(members: Sequence[T | None], min_size: int, multiple: int = 1) -> tuple[list[T | None], list[T]]:
    """Close the gaps of vacant ranks.

    Returns:
        The members in their order, without vacant ranks except the first ones that are needed for ``min_size``; and the members
        that are too many for a multiple of ``multiple``. ``min_size`` is such a multiple.
    """
    num_short = max(0, min_size - sum(member is not None for member in members))
    kept = [rank for rank, member in enumerate(members) if member is None][:num_short]
    closed = [member for rank, member in enumerate(members) if member is not None or rank in kept]
    size = max(min_size, len(closed) - len(closed) % multiple)
    return closed[:size], [member for member in closed[size:] if member is not None]


def make_members(workers: Sequence[WorkerInfo], gpus_per_worker: float, workers_per_replica: int = 1) -> list[Member]:
    """Return the workers' places in their process group, which has no rendezvous yet.

    Args:
        workers: Where each worker runs, by rank; a node's workers need not be next to each other.
        gpus_per_worker: May be a fraction.
        workers_per_replica: See `raysgd.config.ScalingConfig`.
    """
    shares_gpu = 0 < gpus_per_worker < 1 or any(map(_has_mig_device, workers))  # the MIG devices of one GPU share it
    sizes = Counter(worker.node_id for worker in workers)
    node_ranks = {node: rank for rank, node in enumerate(sizes)}
    seen: Counter[str] = Counter()
    members = []
    for rank, worker in enumerate(workers):
        members.append(
            Member(
                rank=rank,
                world_size=len(workers),
                local_rank=seen[worker.node_id],
                local_world_size=sizes[worker.node_id],
                node_rank=node_ranks[worker.node_id],
                rendezvous="",
                node_ip=worker.node_ip,
                has_gpu=gpus_per_worker > 0,
                shares_gpu=shares_gpu,
                workers_per_replica=workers_per_replica,
                num_nodes=len(sizes),
            )
        )
        seen[worker.node_id] += 1
    return members


def assign_visible_gpus(workers: Sequence[WorkerInfo], *, shows_all: bool) -> list[tuple[tuple[GpuId, ...], int]]:
    """Return the GPUs that each worker shall see, and the index of its own first GPU among them.

    Args:
        workers: Where each worker is, with its own GPUs.
        shows_all: Show all GPUs of a node's workers to each of them, which nccl needs for direct transfers. Workers with
            MIG devices see their own alone in any case: CUDA uses only the first that is visible to a process.
    """
    of_nodes: dict[str, set[GpuId]] = {}
    for worker in workers:
        if not _has_mig_device(worker):
            of_nodes.setdefault(worker.node_id, set()).update(worker.gpu_ids)
    assigned = []
    for worker in workers:
        seen = of_nodes[worker.node_id] if shows_all and not _has_mig_device(worker) else set(worker.gpu_ids)
        gpus = tuple(sorted(seen, key=_numbers_first))
        assigned.append((gpus, gpus.index(worker.gpu_ids[0]) if worker.gpu_ids else 0))
    return assigned


def _has_mig_device(worker: WorkerInfo) -> bool:
    return any(isinstance(gpu, str) and gpu.startswith("MIG-") for gpu in worker.gpu_ids)


def _numbers_first(gpu: GpuId) -> tuple[int, str]:
    return (gpu, "") if isinstance(gpu, int) else (sys.maxsize, gpu)


def choose_rendezvous_ips(infos: Sequence[WorkerInfo], backend: BackendConfig) -> list[str]:
    """Return where ranks open the rendezvous, rank 0 first: at a loopback address if all workers are on one node."""
    is_one_node = all(info.node_id == infos[0].node_id for info in infos)
    opening = infos if backend.opens_on_all_ranks else infos[:1]
    return [loopback_of(info.node_ip) if is_one_node else info.node_ip for info in opening]


def join_opened(backend: BackendConfig, opened: Sequence[str]) -> str | None:
    """Return the value of `Member.rendezvous` from what the ranks that opened it returned; None if none has."""
    if not opened:
        return None
    return json.dumps(list(opened)) if backend.opens_on_all_ranks else opened[0]
