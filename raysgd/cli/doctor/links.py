"""Which pairs of nodes `raysgd doctor` measures, and which it calls cut or slow. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median_low

#: Two nodes, by their numbers, the smaller one first.
Pair = tuple[int, int]
#: A pair is slow if it takes so many times as long as is usual in the cluster.
SLOW_FACTOR = 3.0


def pair_rounds(count: int) -> list[list[Pair]]:
    """Return rounds in which each of ``count`` nodes meets each other one once, and at most one in a round.

    This is the circle method of tournaments: one node keeps its place, and the others move on by one place each round.
    """
    places: list[int | None] = [*range(count), *[None] * (count % 2)]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def usual_seconds(seconds: Mapping[Pair, float]) -> float:
    """Return what a pair usually takes: the median of each node's fastest pair.

    The median of all pairs would be that of slow ones as soon as one of three nodes is slow: two of three pairs have it.
    """
    fastest: dict[int, float] = {}
    for pair, took_s in seconds.items():
        for node in pair:
            fastest[node] = min(took_s, fastest.get(node, took_s))
    return median_low(fastest.values())


def find_slow(seconds: Mapping[Pair, float]) -> tuple[set[int], set[Pair]]:
    """Return the nodes whose every pair is slow, and the slow pairs of two other nodes."""
    if not seconds:
        return set(), set()
    limit_s = SLOW_FACTOR * usual_seconds(seconds)
    return _gather({pair for pair, took_s in seconds.items() if took_s > limit_s}, seconds)


def find_cut(failed: Collection[Pair], tried: Collection[Pair]) -> tuple[set[int], set[Pair]]:
    """Return the nodes whose every pair has failed, and the other pairs that have; of two cut nodes, both."""
    return _gather(set(failed), tried)


def _gather(bad: set[Pair], all_pairs: Collection[Pair]) -> tuple[set[int], set[Pair]]:
    """Return the nodes all of whose pairs, two or more, are bad, and the bad pairs of two other nodes."""
    of_node: dict[int, list[Pair]] = {}
    for pair in all_pairs:
        for node in pair:
            of_node.setdefault(node, []).append(pair)
    nodes = {node for node, pairs in of_node.items() if len(pairs) > 1 and bad.issuperset(pairs)}
    return nodes, {pair for pair in bad if nodes.isdisjoint(pair)}


def clock_difference(asked_s: float, answered_s: float, there_s: float) -> float:
    """Return by how much another clock is certainly ahead of this one; negative if it is behind, 0 if that is not certain.

    Args:
        asked_s: When it was asked, by the clock of this machine.
        answered_s: When the answer came.
        there_s: The other clock, at some time between.
    """
    return max(there_s - answered_s, 0.0) or min(there_s - asked_s, 0.0)


def first_ones(lines: Sequence[str], limit: int) -> Iterator[str]:
    """Yield at most ``limit`` lines; the last one says how many more there are."""
    if len(lines) <= limit:
        yield from lines
        return
    yield from lines[: limit - 1]
    yield f"and {len(lines) - limit + 1} more"
