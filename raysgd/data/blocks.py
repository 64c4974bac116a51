"""Tables and arrays as blocks of rows, small enough to be stored and fetched one by one. Driver side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.names import column_of
from raysgd.errors import ConfigError

#: About what a block holds.
BLOCK_BYTES = 64 * 2**20

Arrays = dict[str, NDArray[Any]]


def arrow_blocks(name: str, given: Any) -> list[tuple[Any, int]]:
    """A Table or RecordBatch as Tables, each column in one chunk, with their row counts."""
    import pyarrow as pa

    table = pa.Table.from_batches([given]) if isinstance(given, pa.RecordBatch) else given
    _check_names(name, table.column_names)
    parts = _cut(table.num_rows, table.nbytes)
    return [(_in_one_chunk(table.slice(part.start, len(part))), len(part)) for part in parts]


def table_of_frame(name: str, frame: Any) -> Any:
    """A DataFrame as a Table. Arrow would take NaN for null; in columns that NumPy holds it stays what it is."""
    import pyarrow as pa

    names = [str(column) for column in frame.columns]
    _check_names(name, names)
    columns = []
    for position, column in enumerate(names):
        series = frame.iloc[:, position]
        is_numpy = isinstance(series.dtype, np.dtype) and series.dtype.kind in "biuf"
        try:
            columns.append(pa.array(series.to_numpy(), from_pandas=False) if is_numpy else pa.Array.from_pandas(series))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ConfigError(f"{column_of(name, column)} cannot be an Arrow column: {error}") from error
    return pa.Table.from_arrays(columns, names=names)


def table_of_hugging_face(dataset: Any) -> Any:
    """A `datasets.Dataset` as a Table, which refers to the files that it lies in; its own array types as lists."""
    import pyarrow as pa

    table = dataset.with_format("arrow", columns=dataset.format["columns"])[:]
    for position, column in enumerate(table.columns):
        if isinstance(column.type, pa.ExtensionType):
            stored = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
            table = table.set_column(position, table.column_names[position], stored)
    return table


def blocks_of_arrays(name: str, given: Mapping[Any, Any]) -> list[tuple[Arrays, int]]:
    """A dict of arrays or tensors, cut along their first axis."""
    _check_names(name, list(given))
    arrays = {column: _array(name, column, value) for column, value in given.items()}
    num_rows = _common_length(name, arrays)
    parts = _cut(num_rows, sum(array.nbytes for array in arrays.values()))
    return [
        ({column: np.ascontiguousarray(array[part.start : part.stop]) for column, array in arrays.items()}, len(part))
        for part in parts
    ]


def blocks_of_rows(name: str, rows: Sequence[Mapping[Any, Any]]) -> list[tuple[Arrays, int]]:
    """A list of dicts with the same keys. What does not make a rectangular array stays an array of objects."""
    columns = list(rows[0])
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ConfigError(
                f"row {index} of dataset {name!r} has the keys {sorted(map(str, row))}, row 0 {sorted(map(str, columns))}; "
                "give every row the same."
            )
    return blocks_of_arrays(name, {column: _stack([row[column] for row in rows]) for column in columns})


def _cut(num_rows: int, num_bytes: int) -> list[range]:
    """Equal parts of about `BLOCK_BYTES`; of a dataset without rows one, which still tells its columns."""
    per_block = max(1, BLOCK_BYTES * num_rows // max(1, num_bytes))
    return [range(i, min(i + per_block, num_rows)) for i in range(0, max(1, num_rows), per_block)]


def _in_one_chunk(table: Any) -> Any:
    return table if all(column.num_chunks == 1 for column in table.columns) else table.combine_chunks()


def _check_names(name: str, columns: Iterable[Any]) -> None:
    names = list(columns)
    for column in names:
        if not isinstance(column, str):
            raise ConfigError(f"dataset {name!r} has a column named {column!r}; names are strings.")
        if names.count(column) > 1:
            raise ConfigError(
                f"dataset {name!r} has {names.count(column)} columns named {column!r}; rename all but one."
            )
    if not names:
        raise ConfigError(f"dataset {name!r} has no columns.")


def _array(name: str, column: str, value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        try:
            value = value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse and quantized tensors
            raise ConfigError(
                f"{column_of(name, column)} is a tensor of {value.dtype} ({value.layout}), which NumPy has no array for; convert "
                "it, as by .float() or .to_dense()."
            ) from error
    if value.ndim == 0:
        raise ConfigError(f"{column_of(name, column)} is a single number; its first axis must be that of the rows.")
    if isinstance(value, np.ma.MaskedArray):
        raise ConfigError(f"{column_of(name, column)} is a masked array; fill it: array.filled(value).")
    plain = np.asarray(value)
    return plain if plain.dtype.isnative else plain.astype(plain.dtype.newbyteorder("="))


def _common_length(name: str, arrays: Arrays) -> int:
    lengths = {column: len(array) for column, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{column!r} {length}" for column, length in lengths.items())
        raise ConfigError(
            f"dataset {name!r} has columns of different lengths: {told}. A dict of arrays is one dataset with a column for "
            "each; for several datasets give a dict of such dicts."
        )
    return next(iter(lengths.values()))


def _stack(values: list[Any]) -> NDArray[Any]:
    values = [value.detach().cpu().numpy() if hasattr(value, "detach") else value for value in values]
    try:
        stacked = np.asarray(values)
    except ValueError:  # ragged
        stacked = np.asarray(None)
    if stacked.ndim and stacked.dtype.kind not in "USO":
        return stacked
    objects = np.empty(len(values), object)
    for index, value in enumerate(values):
        objects[index] = np.asarray(value) if isinstance(value, (list, tuple)) else value
    return objects
