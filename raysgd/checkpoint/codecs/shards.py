"""Arrays that are distributed over ranks: where a shard lies in its array, and the table of shards in a rank's part.

Pure: knows neither arrays nor files, so that the control plane can import it without NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from raysgd.checkpoint.codecs.leaves import Json
from raysgd.errors import CheckpointCorruptError

#: Key of the table in a part's JSON, and the tag of a sharded array in its tree.
SHARDS_KEY = "shards"
_MAX_NDIM = 64


class ShardIndex(NamedTuple):
    """The elements of an array from ``begin`` up to, but without, ``end``.

    Each has one number per dim of the array: ``ShardIndex((), ())`` is a scalar.
    """

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
        """Return slices that select these elements in an array whose first element lies at ``origin``."""
        origin = origin or (0,) * len(self.begin)
        return tuple(slice(b - o, e - o) for b, e, o in zip(self.begin, self.end, origin, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{begin}:{end}" for begin, end in zip(self.begin, self.end, strict=True)) + "]"


def full_index(shape: Sequence[int]) -> ShardIndex:
    """Return the index of a whole array."""
    return ShardIndex((0,) * len(shape), tuple(shape))


def index_from_slices(slices: Sequence[slice], shape: Sequence[int]) -> ShardIndex:
    """Convert slices, by which frameworks say where a shard lies. Dims that are left out are taken whole.

    Raises:
        ValueError: A slice has a step, or there are more slices than dims.
    """
    if len(slices) > len(shape):
        raise ValueError(f"{len(slices)} slices for an array of {len(shape)} dims")
    spans = [part.indices(extent) for part, extent in zip(slices, shape, strict=False)]
    if any(step != 1 for _, _, step in spans):
        raise ValueError(f"{tuple(slices)} has steps")
    spans += [(0, extent, 1) for extent in shape[len(slices) :]]
    return ShardIndex(tuple(begin for begin, _, _ in spans), tuple(max(begin, end) for begin, end, _ in spans))


def intersect(one: ShardIndex, other: ShardIndex) -> ShardIndex | None:
    """Return the elements that two indices share; None if they share none."""
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    return ShardIndex(begin, end) if all(b < e for b, e in zip(begin, end, strict=True)) else None


def find_tiling_error(shape: Sequence[int], indices: Sequence[ShardIndex]) -> str | None:
    """Say why ``indices`` do not cover each element of an array exactly once; None if they do."""
    outside = next((index for index in indices if not _is_within(index, shape)), None)
    if outside is not None:
        return f"{outside} lies outside of its shape {tuple(shape)}"
    filled = [index for index in indices if index.size]
    if not _are_grid_cells(filled):
        pair = _first_overlap(filled)
        if pair is not None:
            return f"{pair[0]} and {pair[1]} overlap"
    size, wanted = sum(index.size for index in filled), math.prod(shape)
    return None if size == wanted else f"only {size:,} of {wanted:,} elements are there"


def _is_within(index: ShardIndex, shape: Sequence[int]) -> bool:
    if len(index.begin) != len(shape) or len(index.end) != len(shape):
        return False
    return all(0 <= begin <= end <= extent for begin, end, extent in zip(index.begin, index.end, shape, strict=True))


def _are_grid_cells(indices: Sequence[ShardIndex]) -> bool:
    """Whether the indices are different cells of one grid, as the shards of a mesh are, so that none overlap.

    Comparing each with each instead would be slow for the shards of a thousand devices.
    """
    if len({index.begin for index in indices}) < len(indices):
        return False
    for spans in zip(*(zip(index.begin, index.end, strict=True) for index in indices), strict=True):
        cuts = sorted(set(spans))
        if any(before[1] > after[0] for before, after in pairwise(cuts)):
            return False
    return True


def _first_overlap(indices: Sequence[ShardIndex]) -> tuple[ShardIndex, ShardIndex] | None:
    """Find two indices that overlap. Only those that meet in the first dim are compared."""
    near: list[ShardIndex] = []
    for index in sorted(indices):
        near = [other for other in near if not index.begin or other.end[0] > index.begin[0]]
        for other in near:
            if intersect(other, index) is not None:
                return other, index
        near.append(index)
    return None


class ShardWriter:
    """Collects the table of shards of one rank's part while its state is encoded.

    Args:
        world_size: Number of ranks that save parts. With one rank, every array that a framework could distribute counts as
            distributed, because more ranks may load it.

    Attributes:
        table: The table, as it is written.
        names: Names of the leaves that are shards.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.table: dict[str, Json] = {}
        self.names: set[str] = set()

    def add(self, path: Iterable[Any], dtype: Json, shape: Sequence[int], shards: Mapping[ShardIndex, str]) -> Json:
        """Add an array and return its node in the tree.

        Args:
            path: Keys from the root of the state.
            dtype: As `raysgd.checkpoint.codecs.numpy` writes it.
            shape: Of the whole array.
            shards: Names of the leaves that hold this rank's shards.
        """
        place = "".join(f"[{key!r}]" for key in path)
        while place in self.table:  # keys that look alike, such as NaN twice
            place += "~"
        self.names |= set(shards.values())
        self.table[place] = [dtype, list(shape), [[*map(list, index), name] for index, name in shards.items()]]
        return [SHARDS_KEY, place]


@dataclass(frozen=True)
class ArrayShards:
    """One array's entry in the table of a part.

    Attributes:
        dtype: As `raysgd.checkpoint.codecs.numpy` writes it.
        shape: Of the whole array.
        shards: Where each shard lies, and the name of the tensor that holds it.
    """

    dtype: Json
    shape: tuple[int, ...]
    shards: tuple[tuple[ShardIndex, str], ...]


def read_table(table: Json, where: str) -> dict[str, ArrayShards]:
    """Parse the table of a part: its arrays by their places in the state.

    Raises:
        CheckpointCorruptError: `ShardWriter` writes no such table.
    """
    try:
        return {_parse_text(place): _parse_entry(*entry) for place, entry in table.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptError(f"{where}: its table of shards is damaged: {error}") from error


def _parse_entry(dtype: Json, shape: Json, shards: Json) -> ArrayShards:
    if len(shape) > _MAX_NDIM:
        raise ValueError(f"{len(shape)} dims")
    parsed = tuple((ShardIndex(_parse_counts(b), _parse_counts(e)), _parse_text(name)) for b, e, name in shards)
    return ArrayShards(dtype, _parse_counts(shape), parsed)


def _parse_counts(values: Json) -> tuple[int, ...]:
    if type(values) is not list or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"{values!r:.50} are not counts")
    return tuple(values)


def _parse_text(value: Json) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.50} is not text")
    return value
