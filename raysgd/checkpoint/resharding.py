"""Loads a state that several ranks saved in parts, for any number of ranks; a `SavedArray` is an array of such a state.

Arrays are put together from their shards in all parts. All other values belong to a rank: if as many ranks load as saved,
each gets its own. Otherwise these values must be equal in all parts, and all ranks get them.

Runs in workers and drivers.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from raysgd.checkpoint.codecs.leaves import ByteArray, Json
from raysgd.checkpoint.codecs.numpy import dtype_from_json
from raysgd.checkpoint.codecs.shards import (
    ArrayShards,
    ShardIndex,
    find_tiling_error,
    full_index,
    index_from_slices,
    intersect,
)
from raysgd.checkpoint.format.manifest import Manifest, missing_part_error
from raysgd.checkpoint.format.parts import PartReader, aligned_empty
from raysgd.checkpoint.storage.files import CHUNK_BYTES
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ReshardError


@dataclass(frozen=True)
class StoredShard:
    """A shard of an array: the tensor ``name`` in a part holds the elements at ``index``."""

    index: ShardIndex
    part: PartReader
    name: str


@final
class SavedArray:
    """An array that was saved in shards. It holds no data in memory: reading it, or a slice of it, makes a NumPy array.

    ``saved[2:4, :8]`` reads these elements, ``np.asarray(saved)`` reads all. `raysgd.jax.restore` makes `jax.Array`s. What was
    saved from a torch DTensor has a torch dtype, is read as torch tensors, and `raysgd.torch.restore` makes DTensors of it.
    Read it before the next ``save_checkpoint``, which may delete the checkpoint that holds it.

    Attributes:
        shape: Of the whole array.
        dtype: A NumPy dtype; a torch dtype for what was saved from torch.
    """

    def __init__(
        self,
        place: str,
        shape: tuple[int, ...],
        dtype: Any,
        shards: Sequence[StoredShard],
        on_unusable: Callable[[Exception], None],
    ) -> None:
        self.shape = shape
        self.dtype: Any = dtype
        self._is_tensor = not isinstance(dtype, np.dtype)
        self._place = place
        self._shards = shards
        self._on_unusable = on_unusable

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def place_of_data(self) -> frozenset[Any]:
        """A key that is equal for arrays whose data was saved once for both, as that of tied weights is."""
        return frozenset((shard.index, shard.part.where, shard.name) for shard in self._shards)

    def __getitem__(self, key: Any) -> Any:
        """Read the elements of slices without steps, one for each of the first dims, as a new array or tensor."""
        slices = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, slice) for part in slices):
            raise TypeError(f"{self!r} is read by slices, such as saved[2:4, :8]; np.asarray(...) reads all of it.")
        return self._read(slices)

    def read(self) -> Any:
        """Read all of it, as a NumPy array or a torch tensor."""
        return self._read(full_index(self.shape).slices())

    def check(self, key: tuple[slice, ...]) -> bool:
        """Compare the elements of slices with their checksums before they are read, where this costs little.

        Returns:
            Whether `read_into` will find no damage, so that it may fill memory that is in use.

        Raises:
            CheckpointCorruptError: They are not.
        """
        index = index_from_slices(key, self.shape)
        item_bytes = self.dtype.itemsize
        with self._telling_errors():
            for shard in self._shards:
                if (common := intersect(shard.index, index)) is not None:
                    first, num_rows, row_bytes = _rows(common, shard.index, item_bytes)
                    if not shard.part.check(shard.name, first * row_bytes, num_rows * row_bytes):
                        return False
        return True

    def read_into(self, key: tuple[slice, ...], memory: ByteArray) -> None:
        """Fill memory with the elements of slices, in C order."""
        index = index_from_slices(key, self.shape)
        with self._telling_errors():
            for shard in self._shards:
                if (common := intersect(shard.index, index)) is not None:
                    self._copy(shard, common, index, memory)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self!r} is not in memory, so it cannot become an array without a copy.")
        array = np.asarray(self.read())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __raysgd_unwrap__(self) -> Any:
        """Refuse to be saved: ``save_checkpoint`` calls this.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(
            f"{self!r} was loaded but not restored: save what raysgd.{'torch' if self._is_tensor else 'jax'}.restore makes of "
            "it, or its read()."
        )

    def __repr__(self) -> str:
        return f"SavedArray(state{self._place}, shape={self.shape}, dtype={self.dtype})"

    def _read(self, key: tuple[slice, ...]) -> Any:
        index = index_from_slices(key, self.shape)
        memory = aligned_empty(index.size * self.dtype.itemsize)
        self.read_into(key, memory)
        if self._is_tensor:
            return _torch_codec().tensor_from_bytes(memory, self.dtype, index.shape)
        return np.ndarray(index.shape, self.dtype, memory)

    @contextlib.contextmanager
    def _telling_errors(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            self._on_unusable(error)
            raise

    def _copy(self, shard: StoredShard, common: ShardIndex, index: ShardIndex, memory: ByteArray) -> None:
        """Read the elements that a shard and ``index`` have in common to their place in the memory of ``index``."""
        first, num_rows, row_bytes = _rows(common, shard.index, self.dtype.itemsize)
        if common.shape[1:] == index.shape[1:] == shard.index.shape[1:]:  # whole rows of both are contiguous in both
            begin = _rows(common, index, self.dtype.itemsize)[0] * row_bytes
            shard.part.read(shard.name, first * row_bytes, memory[begin : begin + num_rows * row_bytes])
            return
        dtype = (
            np.dtype(f"V{self.dtype.itemsize}") if self._is_tensor else self.dtype
        )  # NumPy lacks some types of torch
        target = np.ndarray(index.shape, dtype, memory)[common.slices(index.begin)]
        columns = (slice(None), *common.slices(shard.index.begin)[1:])
        step = max(1, CHUNK_BYTES // row_bytes)
        for row in range(0, num_rows, step):  # in chunks, since the shard may be large
            count = min(step, num_rows - row)
            rows = aligned_empty(count * row_bytes)
            shard.part.read(shard.name, (first + row) * row_bytes, rows)
            target[row : row + count] = np.ndarray((count, *shard.index.shape[1:]), dtype, rows)[columns]


def _rows(common: ShardIndex, outer: ShardIndex, item_bytes: int) -> tuple[int, int, int]:
    """Return which rows (along the first dim) of ``outer`` are in ``common``: the first, their number, bytes of each."""
    row_bytes = math.prod(outer.shape[1:]) * item_bytes
    if not common.begin:
        return 0, 1, row_bytes
    return common.begin[0] - outer.begin[0], common.shape[0], row_bytes


def load_parts(
    manifest: Manifest,
    parts: Mapping[int, PartReader],
    rank: int,
    *,
    world_size: int | None,
    where: str,
    allow_pickle: bool,
    on_unusable: Callable[[Exception], None],
) -> Any:
    """Load the state of a rank: its own part if each rank saved one, else the one part for all ranks.

    Args:
        manifest: The checkpoint's manifest; the files that it lists are not used.
        parts: Parts by the rank that saved them.
        rank: The rank that loads.
        world_size: Number of ranks that load. None: one process loads alone, for which arrays are read whole.
        where: The checkpoint, for messages.
        allow_pickle: Allow pickled leaves.
        on_unusable: Called with an error that occurs later, when an array is read.

    Raises:
        ReshardError: Another number of ranks saved, and the parts differ in more than array shards.
        CheckpointCorruptError: Shards are missing or overlap.
    """
    if not manifest.all_ranks:
        return parts[min(parts)].load(allow_pickle=allow_pickle)
    is_same = rank in parts and world_size in (None, manifest.world_size)
    part = parts[rank if is_same else min(parts)]
    if not is_same and world_size is not None and manifest.world_size == 1 and not part.shards:
        return part.load(allow_pickle=allow_pickle)  # one rank has saved for all
    if not is_same:
        can_reshard = part.shards and world_size is not None
        if can_reshard and not manifest.is_reshardable:
            _raise_difference(parts, where, manifest.world_size)
        if not can_reshard or not manifest.is_reshardable:
            raise missing_part_error(where, manifest, parts, rank, world_size)
    if not part.shards:
        return part.load(allow_pickle=allow_pickle)
    is_whole = world_size is None or world_size == manifest.world_size == 1
    arrays = {
        place: array.read() if is_whole or not array.shape else array
        for place, array in _assemble(parts, where, on_unusable).items()
    }
    leaves = {name: part.leaf(name) for name in part.unsharded_names}
    return part.decode(leaves, arrays, allow_pickle=allow_pickle)


def _assemble(
    parts: Mapping[int, PartReader], where: str, on_unusable: Callable[[Exception], None]
) -> dict[str, SavedArray]:
    by_place: dict[str, dict[int, ArrayShards]] = {}
    for rank, part in sorted(parts.items()):
        for place, array in part.shards.items():
            by_place.setdefault(place, {})[rank] = array
    return {place: _saved_array(place, by_rank, parts, where, on_unusable) for place, by_rank in by_place.items()}


def _saved_array(
    place: str,
    by_rank: Mapping[int, ArrayShards],
    parts: Mapping[int, PartReader],
    where: str,
    on_unusable: Callable[[Exception], None],
) -> SavedArray:
    label = f"{where}: state{place}"
    first = min(by_rank)
    array = by_rank[first]
    for rank, other in by_rank.items():
        if (other.shape, other.dtype) != (array.shape, array.dtype):
            raise CheckpointCorruptError(
                f"{label} is {array.dtype} of shape {array.shape} on rank {first} but {other.dtype} of shape {other.shape} "
                f"on rank {rank}"
            )
    by_index: dict[ShardIndex, StoredShard] = {}  # several ranks may have saved the same shard
    for rank, each in by_rank.items():
        for index, name in each.shards:
            by_index.setdefault(index, StoredShard(index, parts[rank], name))
    shards = list(by_index.values())
    problem = find_tiling_error(array.shape, [shard.index for shard in shards])
    if problem is not None:
        raise CheckpointCorruptError(
            f"{label}, of shape {array.shape}, cannot be put together: {problem}, in the parts of ranks {sorted(parts)}"
        )
    return SavedArray(place, array.shape, _parse_dtype(array.dtype, label), shards, on_unusable)


def _torch_codec() -> Any:
    return importlib.import_module("raysgd.checkpoint.codecs.torch")


def _parse_dtype(description: Json, label: str) -> Any:
    try:
        if isinstance(description, str) and description.startswith("torch."):
            return _torch_codec().dtype_from_json(description)
        return dtype_from_json(description)
    except (TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{label} has an invalid dtype: {error}") from error


def _raise_difference(parts: Mapping[int, PartReader], where: str, saved_by: int) -> None:
    """Raise ReshardError for the first value outside array shards that differs between ranks, if there is one."""
    first, *others = sorted(parts)
    for rank in others:
        place = _different_node(parts[first].state, parts[rank].state) or _different_leaf(parts[first], parts[rank])
        if place is not None:
            raise ReshardError(
                f"{where} was saved by {saved_by} ranks: {place} differs between ranks {first} and {rank}, so only {saved_by} "
                f"ranks can load it. Save only values that are equal on all ranks, or run with num_workers={saved_by}."
            )


def _different_node(one: Json, other: Json, path: str = "state") -> str | None:
    """Return the place of the first difference between two trees."""
    if one == other:
        return None
    if type(one) is dict and type(other) is dict and one.keys() == other.keys():
        return next(place for key in one if (place := _different_node(one[key], other[key], f"{path}[{key!r}]")))
    if _is_sequence(one) and _is_sequence(other) and len(one) == len(other):
        pairs = enumerate(zip(one[1:], other[1:], strict=True))
        return next(place for number, pair in pairs if (place := _different_node(*pair, f"{path}[{number}]")))
    return path


def _is_sequence(node: Json) -> bool:
    return type(node) is list and len(node) > 1 and node[0] in ("list", "tuple")


def _different_leaf(one: PartReader, other: PartReader) -> str | None:
    """Return the name of the first tensor outside array shards that differs."""
    for name in one.unsharded_names:
        spec, other_spec = one.specs[name], other.specs.get(name)
        if other_spec is None or (spec.dtype, spec.shape) != (other_spec.dtype, other_spec.shape):
            return name
        if not np.array_equal(one.leaf(name).data, other.leaf(name).data):
            return name
    return None
