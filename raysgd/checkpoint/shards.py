"""How arrays that are distributed over ranks are written: each rank's part has pieces of them, and says of what.

Beside the tree a part's document has a table, ``"shards"``: by the array's place in the state its dtype, its shape, and the
pieces that this part has, each with the box it fills (`raysgd.checkpoint.boxes`) and the tensor that holds it. In the tree
stands ``["shards", place]``. Every part names every array, with pieces or without. What an array is, and which pieces a rank
is to write, the module of its framework knows (`raysgd.checkpoint.jax_leaves`).

Runs in workers and drivers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from raysgd.checkpoint.boxes import Box
from raysgd.errors import CheckpointCorruptError

Json: TypeAlias = Any

KIND = "shards"
_MAX_NDIM = 64


class ShardWriter:
    """Collects one part's table.

    Args:
        world_size: How many ranks save parts. In a world of one whatever a framework could distribute counts as distributed:
            more ranks may load it.

    Attributes:
        table: As it is written.
        names: Of the leaves that are pieces.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.table: dict[str, Json] = {}
        self.names: set[str] = set()

    def add(self, path: Iterable[Any], dtype: Json, shape: Sequence[int], pieces: Mapping[Box, str]) -> Json:
        """The node of an array.

        Args:
            path: Keys from the root of the state.
            dtype: As `raysgd.checkpoint.arrays` writes it.
            shape: Of the whole array.
            pieces: Names of the leaves that hold this rank's pieces.
        """
        place = "".join(f"[{key!r}]" for key in path)
        while place in self.table:  # keys that look alike, such as NaN twice
            place += "~"
        self.names |= set(pieces.values())
        self.table[place] = [dtype, list(shape), [[*map(list, box), name] for box, name in pieces.items()]]
        return [KIND, place]


@dataclass(frozen=True)
class Shards:
    """What one part says of an array.

    Attributes:
        dtype: As `raysgd.checkpoint.arrays` writes it.
        shape: Of the whole array.
        pieces: Boxes and the names of the tensors that fill them.
    """

    dtype: Json
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, str], ...]


def read_table(table: Json, where: str) -> dict[str, Shards]:
    """The arrays of a part, by their places.

    Raises:
        CheckpointCorruptError: It is none that `ShardWriter` makes.
    """
    try:
        return {_text(place): _shards(*entry) for place, entry in table.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptError(f"{where}: its table of shards is damaged: {error}") from error


def _shards(dtype: Json, shape: Json, pieces: Json) -> Shards:
    if len(shape) > _MAX_NDIM:
        raise ValueError(f"{len(shape)} dims")
    return Shards(dtype, _counts(shape), tuple((Box(_counts(b), _counts(e)), _text(name)) for b, e, name in pieces))


def _counts(values: Json) -> tuple[int, ...]:
    if type(values) is not list or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"{values!r:.50} are no counts")
    return tuple(values)


def _text(value: Json) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.50} is no text")
    return value
