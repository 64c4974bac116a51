"""Kernels without a residual stream, as in an MLP or a CNN: which read whole inputs, and which read shards. Pure, any process.

Kernels of a chain alternate: one is sharded by its outputs (column parallel), the next one by its inputs (row parallel). Where
a kernel is in its chain is found from shapes, not from names. The sizes of all kernels are the nodes of a graph, in which each
kernel leads from the size of its inputs to that of its outputs. For each connected part, these are tried in order:

1. **Sizes.** If each kernel can lead between a size that is whole and one that is sharded, the part has one such split.
2. **Paths.** A chain is a path through all kernels. If all such paths give each shape the same roles, they decide.
3. **Modules.** Each module below that has several of the kernels is a part of its own.
4. **Names.** Each kernel reads what the nearest fitting kernel before it in the order of names gives. Those that read what no
   other one gives come first, and those whose outputs no other one reads come last. The reason says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.pipeline.sharding.parameters import Choice, Parameter, other_dim
from raysgd.pipeline.sharding.square_kernels import output_dim

#: Steps of the search for paths through the kernels of a part.
_MAX_STEPS = 5000
_BY_SHAPE = "; among kernels of this shape by the order of the names (own rules override it)"
_BY_NAMES = "; by the order of the names, since shapes do not decide (own rules override it)"

Role = Literal["column", "row"]
Edge = tuple[Hashable, Hashable]


@dataclass(frozen=True)
class _Link:
    """A kernel as an edge of the graph of sizes.

    Attributes:
        out: The dimension of its outputs.
        source: The node of its inputs, which is their size.
        target: The node of its outputs: their size, or a node of its own if that size does not divide, since nothing reads
            shards of it.
    """

    kernel: Parameter
    out: int
    source: Hashable
    target: Hashable

    @property
    def edge(self) -> Edge:
        return self.source, self.target

    @property
    def shape(self) -> tuple[int, int]:
        return _size_of(self.source), _size_of(self.target)


def choose_in_chains(kernels: list[Parameter], num_shards: int) -> dict[Parameter, Choice]:
    """Choose for kernels that are not of a part with a residual stream, given in the order of their names."""
    links = []
    for number, (kernel, out) in enumerate(_output_dims(kernels).items()):
        size = kernel.dims[out]
        target: Hashable = size if size % num_shards == 0 else (size, number)
        links.append(_Link(kernel, out, kernel.dims[other_dim(out, kernel)], target))
    chains = _Chains(num_shards)
    chains.choose(links, depth=0)
    return chains.choices


def _output_dims(kernels: list[Parameter]) -> dict[Parameter, int]:
    """Return the dimension of each kernel's outputs; names count only if most kernels without a bias say the same."""
    dims = {kernel: output_dim(kernel, None) for kernel in kernels}
    unclear = [kernel for kernel in kernels if len(kernel.dims) == 2 and kernel.bias is None]
    if 2 * sum(dims[kernel] == 0 for kernel in unclear) <= len(unclear) and len(unclear) > 1:
        dims |= dict.fromkeys(unclear, 1)
    return dims


class _Chains:
    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self.choices: dict[Parameter, Choice] = {}

    def choose(self, links: list[_Link], depth: int) -> None:
        """Choose for kernels of one module, whose path has ``depth`` keys."""
        for part in _connected(links):
            if (roles := _roles_by_sizes(part)) is not None or (roles := _roles_by_paths(part)) is not None:
                for link in part:
                    role, why = roles[link]
                    self._choose_link(link, role, why)
            elif (smaller := _by_module(part, depth)) is not None:
                for each in smaller:
                    self.choose(each, depth + 1 if len(each) == len(part) else depth)
            else:
                self._choose_by_names(part)

    def _choose_by_names(self, links: list[_Link]) -> None:
        given, read = {link.target for link in links}, {link.source for link in links}
        links = sorted(links, key=lambda link: (link.source in given) + (link.target not in read))
        sources = _sources_of(links)
        for link in links:
            waiting = [link]
            while (source := sources[waiting[-1]]) is not None and source.kernel not in self.choices:
                waiting.append(source)
            for each in reversed(waiting):
                if each.kernel not in self.choices:
                    source = sources[each]
                    reads_shards = source is not None and self.choices[source.kernel].dim == source.out
                    self._choose_link(each, "row" if reads_shards else "column", _BY_NAMES)

    def _choose_link(self, link: _Link, role: Role, why: str) -> None:
        kernel, out = link.kernel, link.out
        inputs = other_dim(out, kernel)
        row_reason = "reads the shards of the kernel before it" if role == "row" else "its outputs do not divide"
        reasons = {out: "column parallel: begins a pair of a chain", inputs: f"row parallel: {row_reason}"}
        for dim in (inputs, out) if role == "row" else (out, inputs):
            if kernel.dims[dim] % self._num_shards == 0:
                self.choices[kernel] = Choice(dim, reasons[dim] + why, outputs_first=out == 0)
                return
        why = f"neither {kernel.dims[inputs]} nor {kernel.dims[out]} divides by {self._num_shards}"
        self.choices[kernel] = Choice(None, why)


def _size_of(node: Hashable) -> int:
    return node[0] if isinstance(node, tuple) else node  # type: ignore[return-value]


def _connected(links: list[_Link]) -> list[list[_Link]]:
    """Return the connected parts of the graph, each with its kernels in the given order."""
    part_of: dict[Hashable, int] = {}
    members: dict[int, set[Hashable]] = {}
    for number, link in enumerate(links):
        nodes = set(link.edge)
        for old in {part_of[node] for node in link.edge if node in part_of}:
            nodes |= members.pop(old)
        members[number] = nodes
        part_of |= dict.fromkeys(nodes, number)
    parts: dict[int, list[_Link]] = defaultdict(list)
    for link in links:
        parts[part_of[link.source]].append(link)
    return list(parts.values())


# --------------------------------------------------------------------------------------------------------------- sizes


def _roles_by_sizes(links: list[_Link]) -> dict[_Link, tuple[Role, str]] | None:
    """Split the sizes into whole ones and sharded ones, so that each kernel leads from one to the other; None if none can."""
    neighbours: dict[Hashable, set[Hashable]] = defaultdict(set)
    for link in links:
        neighbours[link.source].add(link.target)
        neighbours[link.target].add(link.source)
    is_second = {links[0].source: False}
    waiting = list(is_second)
    while waiting:
        node = waiting.pop()
        for other in neighbours[node]:
            if is_second.get(other) == is_second[node]:
                return None
            if other not in is_second:
                is_second[other] = not is_second[node]
                waiting.append(other)
    begins, ends = Counter(link.source for link in links), Counter(link.target for link in links)

    def score(side: bool) -> tuple[int, int, int, int]:
        """Return what is larger if the sizes of this side are the whole ones: chains begin there, and they are smaller."""
        nodes = [node for node, is_other in is_second.items() if is_other == side]
        first = sum(begins[node] for node in nodes if not ends[node])
        surplus = sum(max(0, begins[node] - ends[node]) for node in nodes)
        moved = sum(_size_of(node) * (begins[node] + ends[node]) for node in nodes)
        return first, surplus, -moved, -min(map(_size_of, nodes))

    whole = max((False, True), key=score)
    return {link: ("column" if is_second[link.source] == whole else "row", "") for link in links}


# --------------------------------------------------------------------------------------------------------------- paths


def _roles_by_paths(links: list[_Link]) -> dict[_Link, tuple[Role, str]] | None:
    """Find the roles that all paths through all kernels give each shape; None if there is no path, or they differ."""
    edges = Counter(link.edge for link in links)
    shape_of = {link.edge: link.shape for link in links}
    found: dict[Any, list[Role]] | None = None
    num_steps = 0
    for start in _starts(links):
        for path in _paths(edges, start):
            num_steps += 1
            if num_steps > _MAX_STEPS:
                return None
            if path is None:
                continue
            roles: dict[Any, list[Role]] = defaultdict(list)
            is_sharded = False
            for edge in path:
                roles[shape_of[edge]].append("row" if is_sharded else "column")
                is_sharded = not is_sharded and not isinstance(edge[1], tuple)
            if found is None:
                found = roles
            elif {shape: Counter(each) for shape, each in found.items()} != {
                shape: Counter(each) for shape, each in roles.items()
            }:
                return None
    if found is None:
        return None
    in_order = {shape: iter(roles) for shape, roles in found.items()}
    why = {shape: _BY_SHAPE if len(set(roles)) > 1 else "" for shape, roles in found.items()}
    return {link: (next(in_order[link.shape]), why[link.shape]) for link in links}


def _starts(links: list[_Link]) -> list[Hashable]:
    """Return where a path through all kernels may begin."""
    surplus = Counter(link.source for link in links)
    surplus.subtract(link.target for link in links)
    uneven = {node: number for node, number in surplus.items() if number}
    if not uneven:
        return sorted(surplus, key=_size_of)
    return [node for node, number in uneven.items() if number == 1] if sorted(uneven.values()) == [-1, 1] else []


def _paths(edges: Counter[Edge], start: Hashable) -> Iterator[list[Edge] | None]:
    """Yield each path from ``start`` that has all edges, as often as there are kernels; None for each step of the search."""
    after: dict[Hashable, list[Hashable]] = defaultdict(list)
    for source, target in sorted(edges, key=lambda edge: (_size_of(edge[0]), _size_of(edge[1]))):
        after[source].append(target)
    left, total = Counter(edges), sum(edges.values())
    path: list[Edge] = []
    waiting = [iter(after[start])]
    while waiting:
        node = path[-1][1] if path else start
        target = next((each for each in waiting[-1] if left[node, each]), None)
        if target is None:
            waiting.pop()
            if path:
                left[path.pop()] += 1
            continue
        left[node, target] -= 1
        path.append((node, target))
        waiting.append(iter(after[target]))
        yield list(path) if len(path) == total else None


# --------------------------------------------------------------------------------------------------- modules and names


def _by_module(links: list[_Link], depth: int) -> list[list[_Link]] | None:
    """Return the kernels of each module below that has several, and the other ones together; None if there is no such module."""
    below: dict[str, list[_Link]] = defaultdict(list)
    for link in links:
        if len(link.kernel.path) > depth + 1:
            below[link.kernel.path[depth]].append(link)
    groups = [group for group in below.values() if len(group) > 1]
    in_groups = {link for group in groups for link in group}
    others = [link for link in links if link not in in_groups]
    return [*groups, *([others] if others else [])] if groups else None


def _sources_of(links: list[_Link]) -> dict[_Link, _Link | None]:
    """Return for each kernel the one whose outputs it reads: the nearest one before it that fits, else the only one after it."""
    sources: dict[_Link, _Link | None] = {}
    for number, link in enumerate(links):
        fitting = [other for other in links[:number] if other.target == link.source]
        sources[link] = fitting[-1] if fitting else None
    for number, link in enumerate(links):
        fitting = [other for other in links[number + 1 :] if other.target == link.source]
        if sources[link] is None and len(fitting) == 1 and not _reads_from(fitting[0], link, sources):
            sources[link] = fitting[0]
    return sources


def _reads_from(link: _Link | None, other: _Link, sources: dict[_Link, _Link | None]) -> bool:
    while link is not None and link is not other:
        link = sources[link]
    return link is other
