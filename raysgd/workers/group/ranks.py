"""Computes which worker gets which rank and sees which GPUs. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

from raysgd.session.base import Identity
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


def close_gaps(members: Sequence[T | None], min_size: int) -> list[T | None]:
    """Return the members in their order without vacant ranks, of which the first ones stay up to ``min_size`` in all."""
    num_short = max(0, min_size - sum(member is not None for member in members))
    kept = [rank for rank, member in enumerate(members) if member is None][:num_short]
    return [member for rank, member in enumerate(members) if member is not None or rank in kept]


def make_identities(nodes: Sequence[str]) -> list[Identity]:
    """Return the identity of each worker, given their nodes by rank; a node's workers need not be next to each other."""
    order = list(dict.fromkeys(nodes))
    counts = dict.fromkeys(order, 0)
    identities = []
    for rank, node in enumerate(nodes):
        identities.append(Identity(rank, len(nodes), counts[node], nodes.count(node), order.index(node)))
        counts[node] += 1
    return identities


def assign_visible_gpus(workers: Sequence[WorkerInfo], *, shows_all: bool) -> list[tuple[tuple[GpuId, ...], int]]:
    """Return the GPUs that each worker shall see, and the index of its own first GPU among them.

    Args:
        workers: Where each worker is, with its own GPUs.
        shows_all: Show all GPUs of a node's workers to each of them, which nccl needs for direct transfers.
    """
    assigned = []
    for worker in workers:
        seen = [other for other in workers if other.node_id == worker.node_id] if shows_all else [worker]
        gpus = tuple(sorted({gpu for other in seen for gpu in other.gpu_ids}, key=_numbers_first))
        assigned.append((gpus, gpus.index(worker.gpu_ids[0]) if worker.gpu_ids else 0))
    return assigned


def _numbers_first(gpu: GpuId) -> tuple[int, str]:
    return (gpu, "") if isinstance(gpu, int) else (sys.maxsize, gpu)
