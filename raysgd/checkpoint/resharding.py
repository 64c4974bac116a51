"""A state that was saved in parts with pieces of arrays, for as many ranks as there are now.

Arrays are put together from the pieces in all parts. What is no such array is a rank's own: where as many ranks load as
have saved, each gets its own values; else these must be equal in all parts, and all ranks get them.

Runs in workers and drivers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from raysgd.checkpoint.arrays import dtype_from_json
from raysgd.checkpoint.boxes import why_no_tiling
from raysgd.checkpoint.part_sources import PartSource
from raysgd.checkpoint.saved_array import Piece, SavedArray
from raysgd.checkpoint.shards import Shards
from raysgd.checkpoint.tree import Decoder
from raysgd.checkpoint.wrong_ranks import not_for
from raysgd.errors import CheckpointCorruptError, ReshardError

Json: TypeAlias = Any


def load_parts(
    parts: Mapping[int, PartSource],
    rank: int,
    *,
    saved_by: int,
    world_size: int | None,
    is_reshardable: bool,
    where: str,
    trusted: bool,
    on_unusable: Callable[[Exception], None] = lambda error: None,
) -> Any:
    """The state of a rank.

    Args:
        parts: By the rank that saved them.
        rank: Of the reader.
        saved_by: Number of ranks that saved.
        world_size: Number of ranks that load. None: one process that wants all, for which arrays are read whole.
        is_reshardable: What ranks saved beside arrays is known to be equal.
        where: The checkpoint, for messages.
        trusted: Allow pickled leaves.
        on_unusable: Told of an error that comes up when an array is read, later.

    Raises:
        ReshardError: Another number of ranks saved, and the state is not one for all ranks.
        CheckpointCorruptError: Pieces are missing, or do not fit together.
    """
    is_same = rank in parts and world_size in (None, saved_by)
    part = parts[rank if is_same else min(parts)]
    if not part.shards:
        if is_same:
            return part.load(trusted=trusted)
        raise not_for(where, parts, rank, saved_by, world_size)
    if not is_same and (world_size is None or not is_reshardable):
        if world_size is not None:
            _find_difference(parts, where, saved_by)
        raise not_for(where, parts, rank, saved_by, world_size)
    arrays = _assemble(parts, where, on_unusable)
    is_whole = world_size is None or world_size == saved_by == 1
    values = {place: np.asarray(array) if is_whole or not array.shape else array for place, array in arrays.items()}
    return Decoder(part.leaves(part.own_names), part.where, trusted=trusted, shards=values).decode_state(part.state)


def _assemble(
    parts: Mapping[int, PartSource], where: str, on_unusable: Callable[[Exception], None]
) -> dict[str, SavedArray]:
    by_place: dict[str, dict[int, Shards]] = {}
    for rank, part in sorted(parts.items()):
        for place, shards in part.shards.items():
            by_place.setdefault(place, {})[rank] = shards
    return {place: _array(place, by_rank, parts, where, on_unusable) for place, by_rank in by_place.items()}


def _array(
    place: str,
    by_rank: Mapping[int, Shards],
    parts: Mapping[int, PartSource],
    where: str,
    on_unusable: Callable[[Exception], None],
) -> SavedArray:
    told = f"{where}: state{place}"
    first = min(by_rank)
    shards = by_rank[first]
    for rank, other in by_rank.items():
        if (other.shape, other.dtype) != (shards.shape, shards.dtype):
            raise CheckpointCorruptError(
                f"{told} is {shards.dtype} of shape {shards.shape} to rank {first} and {other.dtype} of shape {other.shape} "
                f"to rank {rank}"
            )
    pieces = [Piece(box, parts[rank], name) for rank, each in by_rank.items() for box, name in each.pieces]
    wrong = why_no_tiling(shards.shape, [piece.box for piece in pieces])
    if wrong is not None:
        raise CheckpointCorruptError(
            f"{told}, of shape {shards.shape}, cannot be put together: {wrong}, in the parts of ranks {sorted(parts)}"
        )
    dtype = _dtype(shards.dtype, told)
    return SavedArray(place, shards.shape, dtype, pieces, on_unusable)


def _dtype(description: Json, told: str) -> Any:
    try:
        return dtype_from_json(description)
    except (TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{told} has a dtype that is none: {error}") from error


def _find_difference(parts: Mapping[int, PartSource], where: str, saved_by: int) -> None:
    """Raise, with its place, for what ranks have beside the arrays and is not the same for all."""
    first, *others = sorted(parts)
    for rank in others:
        differs = _difference(parts[first].state, parts[rank].state) or _different_leaf(parts[first], parts[rank])
        if differs is not None:
            raise ReshardError(
                f"{where} was saved by {saved_by} ranks: {differs} is not the same on ranks {first} and {rank}, so it belongs "
                f"to one of {saved_by}. Save what all ranks share, or run with num_workers={saved_by}."
            )


def _difference(one: Json, other: Json, path: str = "state") -> str | None:
    """The place of a first difference between two trees."""
    if one == other:
        return None
    if type(one) is dict and type(other) is dict and one.keys() == other.keys():
        return next(d for key in one if (d := _difference(one[key], other[key], f"{path}[{key!r}]")))
    if _is_sequence(one) and _is_sequence(other) and len(one) == len(other):
        pairs = enumerate(zip(one[1:], other[1:], strict=True))
        return next(d for index, pair in pairs if (d := _difference(*pair, f"{path}[{index}]")))
    return path


def _is_sequence(node: Json) -> bool:
    return type(node) is list and len(node) > 1 and node[0] in ("list", "tuple")


def _different_leaf(one: PartSource, other: PartSource) -> str | None:
    """The name of a first tensor that differs, of those that are no pieces."""
    for name in one.own_names:
        spec, spec_there = one.specs[name], other.specs.get(name)
        if spec_there is None or (spec.dtype, spec.shape) != (spec_there.dtype, spec_there.shape):
            return name
        here, there = (part.leaves([name]).get(name).data for part in (one, other))
        if not np.array_equal(here, there):
            return name
    return None
