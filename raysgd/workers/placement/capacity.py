"""Computes whether a cluster can hold a group of workers, and explains why it cannot. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raysgd.config import ScalingConfig

#: The number of nodes that a message names.
MAX_SHOWN = 8
_EPSILON = 1e-6  # resources are floats: ten times 0.1 GPU may be more than 1 GPU
#: Stands for a bundle without resources, which Ray refuses: one byte, since all CPUs may be in use.
NOTHING = {"memory": 1.0}
#: Resources that are counted in words.
_UNITS = {"CPU": ("CPU", "CPUs"), "GPU": ("GPU", "GPUs")}
#: The number of holders of a resource that a message names.
_MAX_HOLDERS = 3


@dataclass(frozen=True)
class Node:
    """The resources of a node, in total and free."""

    node_id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Holding:
    """Resources that a Trainer, or somebody else, holds.

    Attributes:
        who: The holder, and how to make it release them.
        amounts: The resources by name.
    """

    who: str
    amounts: Mapping[str, float]


def explain_infeasible(scaling: ScalingConfig, nodes: Sequence[Node], num_spares: int = 0) -> str | None:
    """Say why the cluster cannot hold the workers and their spares even when it is idle; None if it can."""
    return _explain(scaling, [node.total for node in nodes], "the cluster has", num_spares)


def explain_busy(scaling: ScalingConfig, nodes: Sequence[Node], num_spares: int = 0) -> str | None:
    """Say why the free resources cannot hold the workers and their spares; None if they can."""
    return _explain(scaling, [node.free for node in nodes], "free now are", num_spares)


def explain_timeout(num_missing: int, num_workers: int, timeout_s: float, why: str | None) -> str:
    """Return the message for a group that was not ready in time; ``why`` comes from `explain_wait`."""
    what = f"{num_missing} of {num_workers} workers did not start" if num_missing else "the workers did not get ready"
    because = f": {why}" if why else ""
    return f"{what} within {timeout_s:g} s{because}. Free resources, or raise FailureConfig(start_timeout_s=...)."


def explain_wait(scaling: ScalingConfig, count: int, nodes: Sequence[Node], holdings: Sequence[Holding]) -> str | None:
    """Say which resources ``count`` workers wait for, and who holds them; None if the nodes have room for the workers.

    Resources that are in use and not in ``holdings`` count as held by others.
    """
    if explain_busy(replace(scaling, num_workers=count), nodes) is None:
        return None
    bundle = scaling.bundle()
    short = [name for name in bundle if _sum(nodes, name) + _EPSILON < count * bundle[name]]
    if short:
        head = f"waiting for {' and '.join(_count(count * bundle[name], name) for name in short)}"
        if free := [_count(_sum(nodes, name), name) for name in short if _sum(nodes, name) > _EPSILON]:
            head += f" ({', '.join(free)} free)"
    else:  # there are enough, but not on the nodes where the workers would have to be
        short = list(bundle)
        head = f"waiting for room for {count} worker{'s' * (count > 1)} of {describe_bundle(bundle)}"
    held = [(name, _describe_holders(name, nodes, holdings)) for name in short]
    return "; ".join([head, *(text if len(held) == 1 else f"of {name}: {text}" for name, text in held)])


def _describe_holders(resource: str, nodes: Sequence[Node], holdings: Sequence[Holding]) -> str:
    """Return who holds how much of a resource: ``2 are held by your Trainer of run a/run_001, 1 by others``."""
    held = sorted(((each.amounts.get(resource, 0.0), each.who) for each in holdings), reverse=True)[:_MAX_HOLDERS]
    held = [(amount, who) for amount, who in held if amount > _EPSILON]
    total = sum(node.total.get(resource, 0.0) for node in nodes)
    by_others = total - _sum(nodes, resource) - sum(amount for amount, _ in held)
    if by_others > _EPSILON:
        held.append((by_others, "others"))
    if not held:
        return f"the cluster has {_count(total, resource)}"
    (first, who), *others = held
    verb = "is" if first == 1 else "are"
    named = [f"{_number(first)} {verb} held by {who}", *(f"{_number(amount)} by {who}" for amount, who in others)]
    return ", ".join(named)


def _sum(nodes: Sequence[Node], resource: str) -> float:
    """Return how much of a resource is free."""
    return sum(node.free.get(resource, 0.0) for node in nodes)


def _count(amount: float, resource: str) -> str:
    """Return an amount with its unit: ``1 CPU``, ``2 CPUs``, ``3 licence``."""
    one, many = _UNITS.get(resource, (resource, resource))
    return f"{_number(amount)} {one if amount == 1 else many}"


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
    """Return the resources that a worker slot reserves."""
    return scaling.bundle() or dict(NOTHING)


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
