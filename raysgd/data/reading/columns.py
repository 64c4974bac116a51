"""One column of one block as NumPy arrays, without a copy where Arrow and NumPy store numbers alike. Worker side.

Numbers, times and rectangular arrays of them are converted once for the whole block. Only booleans are copied, because Arrow
packs them into bits. Strings, lists and other values are converted batch by batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysgd.data.order.epoch_order import Indices
from raysgd.errors import ConfigError


class Column(Protocol):
    """A column of a block, whose rows are read by their index in the block."""

    def take(self, rows: Indices, *, dense: bool) -> NDArray[Any]:
        """Return these rows. With ``dense``, lists and objects become one array of numbers.

        Raises:
            ConfigError: The values are not numbers, or have different shapes.
        """


def open_column(block: Any, name: str, where: str) -> Column:
    """Open the column ``name`` of a block, a Table or a dict of arrays. ``where`` describes the column in messages."""
    if isinstance(block, dict):
        return ArrayColumn(block[name], where)
    array = _in_one_chunk(block.column(name))
    values = None if isinstance(array, pa.ChunkedArray) else _fixed_width(array, where)
    return ArrowColumn(block.column(name), where) if values is None else ArrayColumn(values, where)


def with_whole_columns(table: Any) -> Any:
    """Return a Table with each column in one chunk, except columns of more than 2 GiB of text, for which Arrow needs several."""
    if all(column.num_chunks == 1 for column in table.columns):
        return table
    return pa.table([_in_one_chunk(column) for column in table.columns], schema=table.schema)


def _in_one_chunk(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        return column.combine_chunks()
    except pa.ArrowInvalid:  # the offsets of one chunk have 32 bits
        return column


def take_rows(values: Any, rows: Indices) -> Any:
    """Return rows of a Table or ChunkedArray, in this order. Arrow's ``take`` alone copies all chunks into one."""
    if isinstance(rows, range):
        return values.slice(rows.start, len(rows))
    try:
        return values.take(pa.array(rows))
    except pa.ArrowInvalid:  # more than 2 GiB of text
        if isinstance(values, pa.Table):
            return pa.table([take_rows(column, rows) for column in values.columns], schema=values.schema)
        if values.num_chunks == 1:
            raise
    starts = np.cumsum([0, *map(len, values.chunks)])
    numbers = np.searchsorted(starts, rows, side="right") - 1
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))  # of consecutive rows in one chunk
    runs = zip(numbers[firsts].tolist(), np.split(rows, firsts[1:]), strict=False)
    taken = [values.chunk(number).take(pa.array(run - starts[number])) for number, run in runs]
    return pa.chunked_array(taken, values.type)


class ArrayColumn:
    """A column that is an array. Ranges of rows are read-only views of it."""

    def __init__(self, values: NDArray[Any], where: str) -> None:
        self._values = values.view()
        self._values.flags.writeable = False
        self._where = where

    def take(self, rows: Indices, *, dense: bool) -> NDArray[Any]:
        if isinstance(rows, range):
            taken: NDArray[Any] = self._values[rows.start : rows.stop]
        else:
            taken = self._values.take(rows, axis=0)
        return _stacked(taken, self._where) if dense and taken.dtype == object else taken


class ArrowColumn:
    """A column of strings, lists or other values, which are converted when they are read."""

    def __init__(self, chunks: Any, where: str) -> None:
        self._chunks = chunks
        self._where = where

    def take(self, rows: Indices, *, dense: bool) -> NDArray[Any]:
        taken = take_rows(self._chunks, rows)
        parts = [self._to_numpy(chunk) for chunk in taken.chunks or [pa.array([], taken.type)]]
        objects = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return _stacked(objects, self._where) if dense and objects.dtype == object else objects

    def _to_numpy(self, array: Any) -> NDArray[Any]:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
            values = _fixed_width(array, self._where)
            if values is not None:
                return values
        if is_list(array.type):
            return _rows_of_lists(array, self._where)
        objects: NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return objects


def _fixed_width(array: Any, where: str) -> NDArray[Any] | None:
    """Return the values as one array of numbers or times, or None if they are something else.

    Raises:
        ConfigError: There are nulls among the numbers.
    """
    kind = array.type
    if hasattr(array, "to_numpy_ndarray"):  # fixed-shape tensors, Arrow's own and Ray's
        _refuse_nulls(array, where)
        tensor: NDArray[Any] = array.to_numpy_ndarray()
        return tensor
    if pa.types.is_fixed_size_list(kind):
        inner = None if array.null_count else _fixed_width(array.flatten(), where)
        if inner is None:
            return None
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        _refuse_nulls(array, where)
    elif not (pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind)):
        return None
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def nulls_message(where: str, num_nulls: int, num_rows: int, kind: Any) -> str:
    """Say that a column of numbers has nulls, and what to do."""
    return (
        f"{where} has {num_nulls} nulls among {num_rows} values of {kind}, which NumPy and torch cannot represent. Fill or drop "
        "them before the run, or read with iter_batches(format='pandas') or 'pyarrow'."
    )


def _refuse_nulls(array: Any, where: str) -> None:
    if array.null_count:
        raise ConfigError(nulls_message(where, array.null_count, len(array), array.type))


def is_list(kind: Any) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _rows_of_lists(array: Any, where: str) -> NDArray[Any]:
    """Return an object array with an array for each row's list."""
    _refuse_nulls(array, where)
    inner = _fixed_width(array.flatten(), where)
    rows = np.empty(len(array), object)
    if inner is None:
        for index, value in enumerate(array.to_pylist()):
            rows[index] = value
        return rows
    ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False)).tolist()
    for index, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        rows[index] = inner[first:last]
    return rows


def _stacked(objects: NDArray[Any], where: str) -> NDArray[Any]:
    """Return objects, one for each row, as one array of numbers."""
    arrays = [_as_array(value, where) for value in objects]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ConfigError(
            f"{where} is ragged: one batch has rows of shape {shapes[0]} and of shape {shapes[-1]}. Pad the rows in "
            "collate_fn, or leave the column out: columns=[...]."
        )
    return np.stack(arrays) if arrays else np.empty(0)


def _as_array(value: Any, where: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
        # Arrays of NumPy's string types drop zeros at the end of a value.
        return np.array(value, object) if array.dtype.kind in "SU" else array
    except ValueError as error:
        raise ConfigError(
            f"{where} is ragged: lists within a row have different lengths. Pad the rows in collate_fn, or leave the column "
            "out: columns=[...]."
        ) from error
