"""Datasets in memory, cut into blocks that are stored and fetched one by one: tables, arrays, lists of dicts. Driver side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.plan import describe_column
from raysgd.errors import ConfigError

#: Approximate size of a block.
BLOCK_BYTES = 64 * 2**20

Arrays = dict[str, NDArray[Any]]


def arrow_blocks(name: str, given: Any, schema: Any = None) -> Iterator[tuple[Any, int]]:
    """Cut a Table or RecordBatch into Tables with whole columns; yield them with their row counts.

    With a ``schema``, each block is converted to it when its turn comes.
    """
    import pyarrow as pa

    from raysgd.data.reading.columns import with_whole_columns

    table = pa.Table.from_batches([given]) if isinstance(given, pa.RecordBatch) else given
    _check_names(name, table.column_names)
    for rows in _cut(table.num_rows, table.nbytes):
        block = with_whole_columns(table.slice(rows.start, len(rows)))
        yield (block if schema is None else block.cast(schema, safe=False)), len(rows)


def table_of_frame(name: str, frame: Any) -> Any:
    """Convert a DataFrame to a Table. NaN in columns of NumPy numbers stays NaN, which Arrow would convert to null."""
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
            raise ConfigError(
                f"{describe_column(name, column)} cannot be converted to an Arrow column: {error}. Give it one type, or drop it."
            ) from error
    return pa.Table.from_arrays(columns, names=names)


def table_of_hugging_face(dataset: Any) -> Any:
    """Convert a `datasets.Dataset` to a Table that refers to its cache files. Hugging Face array types become lists."""
    import pyarrow as pa

    table = dataset.with_format("arrow", columns=dataset.format["columns"])[:]
    for position, column in enumerate(table.columns):
        if isinstance(column.type, pa.ExtensionType):
            stored = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
            table = table.set_column(position, table.column_names[position], stored)
    return table


def schema_of_hugging_face(name: str, dataset: Any, schema: Any) -> Any:
    """Return the schema of a `datasets.Dataset` in its format: a format for tensors converts numbers, to float32 and int64.

    Args:
        name: Its name for messages.
        dataset: The dataset.
        schema: The schema of its table.

    Returns:
        The schema; None if the format converts nothing.

    Raises:
        ConfigError: The format's dtype cannot be stored.
    """
    import pyarrow as pa

    kind, options = dataset.format["type"], dataset.format["format_kwargs"]
    if kind not in _FORMATS:
        return None
    wanted = options.get("dtype")
    try:
        number = None if wanted is None else pa.from_numpy_dtype(np.dtype(_dtype_name(wanted)))
    except (TypeError, pa.ArrowException):
        raise ConfigError(
            f"dataset {name!r} has with_format({kind!r}, dtype={wanted}), which cannot be stored; leave it out and convert in "
            "train_func."
        ) from None
    fields = [field.with_type(_in_format(field.type, number, _FORMATS[kind])) for field in schema]
    return pa.schema(fields)


#: The type of integers in each format of Hugging Face for tensors; floating-point numbers are float32 in all of them.
_FORMATS = {"torch": "int64", "tensorflow": "int64", "numpy": "int64", "jax": "int32"}


def _dtype_name(dtype: Any) -> Any:
    """Return what NumPy understands of a framework's dtype: ``torch.float16`` is ``float16``."""
    name = getattr(dtype, "name", None) or str(dtype)
    return dtype if isinstance(dtype, (type, np.dtype)) else name.rpartition(".")[2]


def _in_format(kind: Any, number: Any, integer: str) -> Any:
    """Return the Arrow type of a column in a format; ``number`` is the type of all its numbers, if that is given."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(_in_format(kind.value_type, number, integer))
    if pa.types.is_large_list(kind):
        return pa.large_list(_in_format(kind.value_type, number, integer))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_in_format(kind.value_type, number, integer), kind.list_size)
    if pa.types.is_integer(kind):
        return number or pa.type_for_alias(integer)
    if pa.types.is_floating(kind):
        return number or pa.float32()
    has_cast = number is not None and number != pa.float16()  # Arrow has none from bool to float16
    return number if pa.types.is_boolean(kind) and has_cast else kind


def blocks_of_arrays(name: str, given: Mapping[Any, Any]) -> list[tuple[Arrays, int]]:
    """Cut a dict of arrays or tensors along the first axis; return dicts of arrays with their row counts."""
    _check_names(name, list(given))
    arrays = {column: _array(name, column, value) for column, value in given.items()}
    num_rows = _common_length(name, arrays)
    cuts = _cut(num_rows, sum(array.nbytes for array in arrays.values()))
    return [
        ({column: np.ascontiguousarray(array[rows.start : rows.stop]) for column, array in arrays.items()}, len(rows))
        for rows in cuts
    ]


def blocks_of_rows(name: str, rows: Sequence[Mapping[Any, Any]]) -> list[tuple[Arrays, int]]:
    """Convert a list of dicts with equal keys to blocks. Values that make no rectangular array stay an array of objects."""
    columns = list(rows[0])
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ConfigError(
                f"row {index} of dataset {name!r} has the keys {sorted(map(str, row))}, but row 0 has "
                f"{sorted(map(str, columns))}; give all rows the same keys."
            )
    return blocks_of_arrays(name, {column: _stack(name, column, [row[column] for row in rows]) for column in columns})


def _cut(num_rows: int, num_bytes: int) -> list[range]:
    """Cut rows into equal ranges of about `BLOCK_BYTES`. A dataset without rows gets one empty block, which has its columns."""
    per_block = max(1, BLOCK_BYTES * num_rows // max(1, num_bytes))
    return [range(i, min(i + per_block, num_rows)) for i in range(0, max(1, num_rows), per_block)]


def _check_names(name: str, columns: Iterable[Any]) -> None:
    names = list(columns)
    for column in names:
        if not isinstance(column, str):
            raise ConfigError(f"dataset {name!r} has a column named {column!r}; give it a string as its name.")
        if names.count(column) > 1:
            raise ConfigError(
                f"dataset {name!r} has {names.count(column)} columns named {column!r}; rename all but one."
            )
    if not names:
        raise ConfigError(f"dataset {name!r} has no columns; give at least one.")


def _array(name: str, column: str, value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        try:
            value = value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse and quantized tensors
            raise ConfigError(
                f"{describe_column(name, column)} is a tensor of {value.dtype} ({value.layout}), which NumPy does not support; "
                "convert it, for example by .float() or .to_dense()."
            ) from error
    if value.ndim == 0:
        raise ConfigError(
            f"{describe_column(name, column)} is a single number; give an array whose first axis is the rows."
        )
    if isinstance(value, np.ma.MaskedArray):
        raise ConfigError(f"{describe_column(name, column)} is a masked array; fill its gaps: array.filled(value).")
    plain = np.asarray(value)
    return plain if plain.dtype.isnative else plain.astype(plain.dtype.newbyteorder("="))


def _common_length(name: str, arrays: Arrays) -> int:
    lengths = {column: len(array) for column, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{column!r} {length}" for column, length in lengths.items())
        raise ConfigError(
            f"dataset {name!r} has columns of different lengths: {listed}. A dict of arrays is one dataset with a column for "
            "each; for several datasets give a dict of such dicts."
        )
    return next(iter(lengths.values()))


def _stack(name: str, column: str, values: list[Any]) -> NDArray[Any]:
    values = [value.detach().cpu().numpy() if hasattr(value, "detach") else value for value in values]
    try:
        stacked = np.asarray(values)
    except ValueError:  # ragged
        stacked = np.asarray(None)
    if stacked.ndim and stacked.dtype.kind not in "USO":
        if stacked.ndim == 1 and stacked.dtype.kind == "f":
            _check_exact(name, column, values)
        return stacked
    objects = np.empty(len(values), object)
    number = _number_type(name, column, values)
    for index, value in enumerate(values):
        value = number(value) if number is not None and value is not None else value
        objects[index] = np.asarray(value) if isinstance(value, (list, tuple)) else value
    return objects


def _number_type(name: str, column: str, values: list[Any]) -> Any:
    """Return the type of numbers among which there are gaps; None if there are other values too.

    Without it, a batch would have the type of its own numbers.
    """
    numbers = [value for value in values if value is not None]
    if len(numbers) == len(values) or not all(isinstance(value, (bool, int, float, np.number)) for value in numbers):
        return None
    kind = np.asarray(numbers).dtype
    if kind.kind == "f":
        _check_exact(name, column, numbers)
    return kind.type if kind.kind in "biuf" else None


def _check_exact(name: str, column: str, values: list[Any]) -> None:
    """Check that integers among floating-point numbers keep their values.

    Raises:
        ConfigError: One is too large.
    """
    for index, value in enumerate(values):
        if type(value) is int and int(float(value)) != value:
            raise ConfigError(
                f"{describe_column(name, column)} has the integer {value} in row {index} and a type that cannot hold it, as "
                "other rows are floating-point or negative numbers: give all rows one type."
            )
