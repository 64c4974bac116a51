"""Boxes: rectangular parts of an array, and the arithmetic of how they meet. Pure; knows neither arrays nor files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Box(NamedTuple):
    """The elements from ``begin`` up to, without, ``end``; one number for each dim of the array. ``Box((), ())`` is a scalar."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Where it is in an array whose first element is at ``origin``."""
        origin = origin or (0,) * len(self.begin)
        return tuple(slice(b - o, e - o) for b, e, o in zip(self.begin, self.end, origin, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{begin}:{end}" for begin, end in zip(self.begin, self.end, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """All of an array."""
    return Box((0,) * len(shape), tuple(shape))


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of slices without steps, as frameworks say where a shard lies; dims that are left out are whole.

    Raises:
        ValueError: A slice has a step, or there are more of them than dims.
    """
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} slices for an array of {len(shape)} dims")
    spans = [part.indices(extent) for part, extent in zip(index, shape, strict=False)]
    if any(step != 1 for _, _, step in spans):
        raise ValueError(f"{tuple(index)} has steps")
    spans += [(0, extent, 1) for extent in shape[len(index) :]]
    return Box(tuple(begin for begin, _, _ in spans), tuple(max(begin, end) for begin, end, _ in spans))


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None for nothing."""
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    return Box(begin, end) if all(b < e for b, e in zip(begin, end, strict=True)) else None


def why_no_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should have each element of an array exactly once; None where they do."""
    outside = next((box for box in boxes if not _is_within(box, shape)), None)
    if outside is not None:
        return f"{outside} lies outside of its shape {tuple(shape)}"
    filled = [box for box in boxes if box.size]
    if not _are_cells(filled):
        pair = _first_overlap(filled)
        if pair is not None:
            return f"{pair[0]} and {pair[1]} overlap"
    size, wanted = sum(box.size for box in filled), math.prod(shape)
    return None if size == wanted else f"{size:,} of {wanted:,} elements are there"


def _is_within(box: Box, shape: Sequence[int]) -> bool:
    if len(box.begin) != len(shape) or len(box.end) != len(shape):
        return False
    return all(0 <= begin <= end <= extent for begin, end, extent in zip(box.begin, box.end, shape, strict=True))


def _are_cells(boxes: Sequence[Box]) -> bool:
    """Whether they are different cells of one grid, as the shards of a mesh are; then none overlaps another.

    It saves comparing each with each, which is slow for the shards of a thousand devices.
    """
    if len({box.begin for box in boxes}) < len(boxes):
        return False
    for spans in zip(*(zip(box.begin, box.end, strict=True) for box in boxes), strict=True):
        cuts = sorted(set(spans))
        if any(before[1] > after[0] for before, after in pairwise(cuts)):
            return False
    return True


def _first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap. Only those are compared that meet in the first dim."""
    near: list[Box] = []
    for box in sorted(boxes):
        near = [other for other in near if not box.begin or other.end[0] > box.begin[0]]
        for other in near:
            if overlap(other, box) is not None:
                return other, box
        near.append(box)
    return None
