"""Who gets which rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.session.base import Identity


def assign_ranks(nodes: Sequence[str]) -> list[Identity]:
    """Ranks for workers on the given nodes, workers of one node next to each other.

    Args:
        nodes: The node of each worker, in the order of the placement group's bundles. The node of the first worker is
            node 0, so that rank 0 stays where the group begins.

    Returns:
        The identity of each worker, in the same order.
    """
    order = list(dict.fromkeys(nodes))
    by_node = sorted(range(len(nodes)), key=lambda i: (order.index(nodes[i]), i))
    counts = dict.fromkeys(order, 0)
    identities: dict[int, Identity] = {}
    for world_rank, index in enumerate(by_node):
        node = nodes[index]
        identities[index] = Identity(
            world_rank=world_rank,
            world_size=len(nodes),
            local_rank=counts[node],
            local_world_size=nodes.count(node),
            node_rank=order.index(node),
        )
        counts[node] += 1
    return [identities[i] for i in range(len(nodes))]
