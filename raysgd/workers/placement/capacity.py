"""Computes whether a cluster can hold a group of workers, and explains why it cannot. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raysgd.config import ScalingConfig

#: The number of nodes that a message names.
MAX_SHOWN = 8
_EPSILON = 1e-6  # resources are floats: ten times 0.1 GPU may be more than 1 GPU


@dataclass(frozen=True)
class Node:
    """The resources of a node, in total and free."""

    node_id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def explain_infeasible(scaling: ScalingConfig, nodes: Sequence[Node], num_spares: int = 0) -> str | None:
    """Say why the cluster cannot hold the workers and their spares even when it is idle; None if it can."""
    return _explain(scaling, [node.total for node in nodes], "the cluster has", num_spares)


def explain_busy(scaling: ScalingConfig, nodes: Sequence[Node], num_spares: int = 0) -> str | None:
    """Say why the free resources cannot hold the workers and their spares; None if they can."""
    return _explain(scaling, [node.free for node in nodes], "free now are", num_spares)


def explain_timeout(num_missing: int, num_workers: int, timeout_s: float, why: str | None) -> str:
    """Return the message for a group that was not ready in time; ``why`` comes from `explain_busy`."""
    what = f"{num_missing} of {num_workers} workers did not start" if num_missing else "the workers did not get ready"
    because = f": {why}, others use the rest" if why else ""
    return f"{what} within {timeout_s:g} s{because}. Free resources, or raise FailureConfig(start_timeout_s=...)."


def _explain(scaling: ScalingConfig, nodes: Sequence[Mapping[str, float]], verb: str, num_spares: int) -> str | None:
    bundle, count = scaling.bundle(), scaling.min_workers + num_spares
    which = _describe_spares(scaling, num_spares)
    for name, amount in bundle.items():
        total = sum(node.get(name, 0) for node in nodes)
        if total + _EPSILON < count * amount:
            return (
                f"needs {count} x {_number(amount)} {name} = {_number(count * amount)}{which}, {verb} {_number(total)}"
            )
    room = [_count_on_node(bundle, node) for node in nodes]
    workers = f"{count} workers of {describe_bundle(bundle)}{which}"
    if scaling.placement_strategy == "STRICT_PACK" and max(room, default=0) < count:
        return f"STRICT_PACK needs one node for {workers}; the largest holds {max(room, default=0)}"
    if scaling.placement_strategy == "STRICT_SPREAD" and sum(r > 0 for r in room) < count:
        return f"STRICT_SPREAD needs {count} nodes for {workers}; {sum(r > 0 for r in room)} can hold one"
    if sum(room) < count:
        return f"needs room for {workers}; the nodes hold {' + '.join(map(str, room))} = {sum(room)}"
    return None


def slot_bundle(scaling: ScalingConfig) -> dict[str, float]:
    """Return the resources that a worker slot reserves; Ray refuses empty bundles."""
    return scaling.bundle() or {"CPU": 0.001}


def list_slots(bundles: Sequence[Mapping[str, float]], bundle: Mapping[str, float]) -> list[int]:
    """Return, for each worker that fits into a placement group, the index of its bundle.

    Args:
        bundles: The free resources of each bundle.
        bundle: The resources of a worker.
    """
    return [index for index, free in enumerate(bundles) for _ in range(_count_on_node(bundle, free))]


def explain_full(scaling: ScalingConfig, bundles: Sequence[Mapping[str, float]], num_spares: int = 0) -> str | None:
    """Say why a placement group with these free bundles cannot hold the workers and their spares; None if it can."""
    bundle, count = scaling.bundle(), scaling.min_workers + num_spares
    room = len(list_slots(bundles, slot_bundle(scaling)))
    if room >= count:
        return None
    which = _describe_spares(scaling, num_spares)
    free = " | ".join(describe_bundle({name: amount for name, amount in held.items() if amount}) for held in bundles)
    return f"needs room for {count} x ({describe_bundle(bundle)}){which}, and its bundles have {free} free, room for {room}"


def count_fitting(bundle: Mapping[str, float], nodes: Sequence[Node]) -> int:
    """Return how many of the bundle fit into the free resources."""
    return sum(_count_on_node(bundle, node.free) for node in nodes)


def describe_bundle(bundle: Mapping[str, float]) -> str:
    """Return the bundle as text, such as ``2 CPU + 1 GPU``."""
    return " + ".join(f"{_number(amount)} {name}" for name, amount in bundle.items()) or "no resources"


def describe_nodes(nodes: Sequence[Node], resources: Sequence[str]) -> str:
    """Return the nodes as text, each with its total of these resources, such as ``a (4 CPU + 1 GPU), b (4 CPU + 0 GPU)``."""
    shown = [
        f"{node.name} ({describe_bundle({name: node.total.get(name, 0) for name in resources})})" for node in nodes
    ]
    more = [f"and {len(nodes) - MAX_SHOWN} more"] if len(nodes) > MAX_SHOWN else []
    return ", ".join([*shown[:MAX_SHOWN], *more])


def _count_on_node(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    # All bundles are equal, so filling one node after the other is exact.
    counts = [_times(amount, node.get(name, 0), is_whole=name == "GPU") for name, amount in bundle.items()]
    return min(counts, default=10**9)


def _times(amount: float, there: float, *, is_whole: bool) -> int:
    """Return how often ``amount`` fits into ``there``; if ``is_whole``, a fraction may not span two units, such as GPUs."""
    if not is_whole or amount >= 1:
        return int((there + _EPSILON) // amount)
    units = int(there + _EPSILON)
    return units * int((1 + _EPSILON) // amount) + int((there - units + _EPSILON) // amount)


def _describe_spares(scaling: ScalingConfig, num_spares: int) -> str:
    return f" ({scaling.min_workers} workers, {num_spares} spare)" if num_spares else ""


def _number(value: float) -> str:
    return f"{value:g}"
