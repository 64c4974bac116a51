"""Who gets which rank, and who sees which GPUs. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from raysgd.session.base import Identity
from raysgd.workers.orders import GpuId, WorkerInfo

T = TypeVar("T")


def assign_ranks(nodes: Sequence[str]) -> list[int]:
    """The order of ranks for workers on the given nodes: workers of one node next to each other.

    Args:
        nodes: The node of each worker, in the order of the placement group's bundles. The node of the first worker comes
            first, so that rank 0 stays where the group begins.

    Returns:
        Indices of ``nodes``, by rank.
    """
    order = {node: place for place, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda index: (order[nodes[index]], index))


def shrunk(members: Sequence[T | None], least: int) -> list[T | None]:
    """The members in their order, without the places of those who are gone.

    As many of these places stay, the first ones, as the group is short of ``least``.
    """
    short = max(0, least - sum(member is not None for member in members))
    kept = [rank for rank, member in enumerate(members) if member is None][:short]
    return [member for rank, member in enumerate(members) if member is not None or rank in kept]


def oldest_first(members: Sequence[T | None], is_old: Callable[[T], bool]) -> list[T | None]:
    """The members in their order, those first that ``is_old`` says so of."""
    return sorted(members, key=lambda member: member is None or not is_old(member))


def identify(nodes: Sequence[str]) -> list[Identity]:
    """The identity of each worker, given their nodes by rank. Workers of a node need not be next to each other."""
    order = list(dict.fromkeys(nodes))
    counts = dict.fromkeys(order, 0)
    identities = []
    for rank, node in enumerate(nodes):
        identities.append(Identity(rank, len(nodes), counts[node], nodes.count(node), order.index(node)))
        counts[node] += 1
    return identities


def visible_gpus(workers: Sequence[WorkerInfo], *, shared: bool) -> list[tuple[tuple[GpuId, ...], int]]:
    """The GPUs each worker shall see, and the index among them of its own first one.

    Args:
        workers: Where each worker is and which GPUs are its own.
        shared: Let the workers of a node see each other's GPUs, which nccl needs to talk between them directly.
    """
    seen = []
    for worker in workers:
        near = [other for other in workers if other.node_id == worker.node_id] if shared else [worker]
        gpus = tuple(sorted({gpu for other in near for gpu in other.gpu_ids}, key=_numbers_first))
        seen.append((gpus, gpus.index(worker.gpu_ids[0]) if worker.gpu_ids else 0))
    return seen


def _numbers_first(gpu: GpuId) -> tuple[int, str]:
    return (gpu, "") if isinstance(gpu, int) else (sys.maxsize, gpu)
