"""`SavedArray`: an array whose pieces lie in the parts of a checkpoint, read where and as far as it is asked for.

Runs in workers and drivers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from raysgd.checkpoint.boxes import Box, box_of, overlap, whole
from raysgd.checkpoint.checksum import CHUNK_BYTES
from raysgd.checkpoint.leaves import ByteArray
from raysgd.checkpoint.part_sources import PartSource
from raysgd.checkpoint.tensor_files import aligned_empty
from raysgd.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError


@dataclass(frozen=True)
class Piece:
    """What a tensor of a part fills of an array."""

    box: Box
    part: PartSource
    name: str


@final
class SavedArray:
    """An array that was saved in shards. Nothing of it is in memory: reading it, or a box of it, makes a NumPy array.

    ``saved[2:4, :8]`` reads these elements, ``np.asarray(saved)`` all. `raysgd.jax.restore` makes `jax.Array`s.
    Read it before the next ``save_checkpoint``: the checkpoint that it lies in may be deleted by a later one.

    Attributes:
        shape: Of the whole array.
        dtype: NumPy's.
    """

    def __init__(
        self,
        place: str,
        shape: tuple[int, ...],
        dtype: Any,
        pieces: Sequence[Piece],
        on_unusable: Callable[[Exception], None],
    ) -> None:
        self.shape = shape
        self.dtype: np.dtype[Any] = dtype
        self._place = place
        self._pieces = pieces
        self._on_unusable = on_unusable

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """The elements of slices without steps, one for each of the first dims, as a new array."""
        slices = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice) for part in slices):
            raise TypeError(f"{self!r} is read by slices, such as saved[2:4, :8]; np.asarray(...) reads all of it.")
        return self._read(box_of(slices, self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self!r} is not in memory, so it cannot be an array without a copy.")
        array = self._read(whole(self.shape))
        return array if dtype is None else array.astype(dtype, copy=False)

    def __raysgd_unwrap__(self) -> Any:
        """For ``save_checkpoint``, which takes no array that is in no memory.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(
            f"{self!r} was loaded and not restored: save what raysgd.jax.restore makes of it, or np.asarray(...)."
        )

    def __repr__(self) -> str:
        return f"SavedArray(state{self._place}, shape={self.shape}, dtype={self.dtype})"

    def _read(self, box: Box) -> NDArray[Any]:
        memory = aligned_empty(box.size * self.dtype.itemsize)
        try:
            for piece in self._pieces:
                if (common := overlap(piece.box, box)) is not None:
                    self._copy(piece, common, box, memory)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            self._on_unusable(error)
            raise
        return np.ndarray(box.shape, self.dtype, memory)

    def _copy(self, piece: Piece, common: Box, box: Box, memory: ByteArray) -> None:
        """Read what a piece and a box have in common to where it stands in the box's memory."""
        first, num_rows, row_bytes = _rows(common, piece.box, self.dtype.itemsize)
        if common.shape[1:] == box.shape[1:] == piece.box.shape[1:]:  # whole rows of both, so they lie together
            begin = _rows(common, box, self.dtype.itemsize)[0] * row_bytes
            piece.part.read(piece.name, first * row_bytes, memory[begin : begin + num_rows * row_bytes])
            return
        target = np.ndarray(box.shape, self.dtype, memory)[common.slices(box.begin)]
        columns = (slice(None), *common.slices(piece.box.begin)[1:])
        step = max(1, CHUNK_BYTES // row_bytes)
        for row in range(0, num_rows, step):  # a chunk at a time: the piece may be a large array
            count = min(step, num_rows - row)
            rows = aligned_empty(count * row_bytes)
            piece.part.read(piece.name, (first + row) * row_bytes, rows)
            target[row : row + count] = np.ndarray((count, *piece.box.shape[1:]), self.dtype, rows)[columns]


def _rows(common: Box, outer: Box, item_bytes: int) -> tuple[int, int, int]:
    """The rows (along the first dim) of ``outer`` that ``common`` has: the first, how many, and their bytes."""
    row_bytes = math.prod(outer.shape[1:]) * item_bytes
    if not common.begin:
        return 0, 1, row_bytes
    return common.begin[0] - outer.begin[0], common.shape[0], row_bytes
