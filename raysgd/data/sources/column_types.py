"""One type for each column of a dataset, decided from the schemas of all files, and which columns hold nulls. Driver side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from raysgd.data.plan import describe_column
from raysgd.errors import ConfigError

#: Statistics that are read at most, one for each column of a row group; nulls of larger datasets are unknown.
_MAX_STATISTICS = 200_000
#: Up to this size all integers are floating-point numbers of 64 bits.
_EXACT = 2**53


def common_schema(name: str, first: Any, schemas: Iterable[tuple[str, Any]]) -> Any:
    """Return the schema whose types hold the values of all files.

    Args:
        name: The dataset's name for messages.
        first: The schema of the first file, with the columns of paths. Its columns are those of the dataset.
        schemas: Each file's path and schema, without the columns of paths.

    Raises:
        ConfigError: A file has a further column, or no type holds a column's values of two files.
    """
    import pyarrow as pa

    found: dict[str, dict[Any, str]] = {field.name: {} for field in first}
    before: Any = None
    for path, schema in schemas:
        if before is not None and schema.equals(before):
            continue
        before = schema
        for field in schema:
            if field.name not in found:
                raise ConfigError(
                    f"dataset {name!r}: {path} has a column {field.name!r}, which others do not have; give all equal columns."
                )
            found[field.name].setdefault(field.type, path)
    fields = []
    for field in first:
        kind = field.type
        for other, path in found[field.name].items():
            kind = _common_type(name, field.name, kind, other, path)
        fields.append(field.with_type(kind))
    return pa.schema(fields, metadata=first.metadata)


def _common_type(name: str, column: str, one: Any, other: Any, path: str) -> Any:
    import pyarrow as pa

    if one.equals(other):
        return one
    if pa.types.is_dictionary(one) != pa.types.is_dictionary(other):
        one, other = (each.value_type if pa.types.is_dictionary(each) else each for each in (one, other))
    is_rounded = any(pa.types.is_decimal(each) for each in (one, other)) and any(
        pa.types.is_floating(each) for each in (one, other)
    )
    try:
        if is_rounded:
            raise pa.ArrowTypeError("floating-point numbers do not hold decimals")
        schemas = [pa.schema([(column, each)]) for each in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(column).type
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"dataset {name!r}: column {column!r} has type {other} in {path} and {one} in other files; write it with one type."
        ) from error


def nulls_of_table(table: Any) -> dict[str, int | None]:
    """Return how many nulls the columns of numbers have that have any."""
    found = {
        name: table.column(name).null_count for name in table.column_names if _is_number(table.schema.field(name).type)
    }
    return {name: count for name, count in found.items() if count}


def nulls_of_files(name: str, fragments: Sequence[Any], schema: Any, is_filtered: bool) -> dict[str, int | None]:
    """Return how many nulls the columns of numbers have that have any, by the files' metadata; None where it does not say so.

    Args:
        name: The dataset's name for messages.
        fragments: The files.
        schema: The schema of the dataset.
        is_filtered: Whether a filter may leave out the rows with nulls.

    Raises:
        ConfigError: Integers of a file are too large for the column's type.
    """
    numbers = [field.name for field in schema if _is_number(field.type)]
    if not all(hasattr(fragment, "row_groups") for fragment in fragments):
        return dict.fromkeys(numbers)
    if sum(fragment.num_row_groups for fragment in fragments) * len(schema) > _MAX_STATISTICS:
        return dict.fromkeys(numbers)
    counts: dict[str, int | None] = {}
    for fragment in fragments:
        metadata, physical = fragment.metadata, fragment.physical_schema
        places = {metadata.schema.column(place).path: place for place in range(metadata.num_columns)}
        for column in numbers:
            if column not in places:
                if column in physical.names:
                    counts[column] = None
                continue
            is_converted = _is_integer(physical.field(column).type) and _is_floating(schema.field(column).type)
            for group in range(metadata.num_row_groups):
                statistics = metadata.row_group(group).column(places[column]).statistics
                _count(
                    counts,
                    column,
                    None if statistics is None or not statistics.has_null_count else statistics.null_count,
                )
                if is_converted and statistics is not None and statistics.has_min_max:
                    _check_exact(name, column, fragment.path, max(abs(statistics.min), abs(statistics.max)))
    return {column: None if is_filtered else count for column, count in counts.items() if count != 0}


def _count(counts: dict[str, int | None], column: str, more: int | None) -> None:
    before = counts.get(column, 0)
    counts[column] = None if before is None or more is None else before + more


def _check_exact(name: str, column: str, path: str, largest: int) -> None:
    if largest > _EXACT:
        raise ConfigError(
            f"{describe_column(name, column)} has integers up to {largest} in {path} and floating-point numbers in other files, "
            "which cannot hold them: write it with one type."
        )


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return _is_integer(kind) or _is_floating(kind) or pa.types.is_boolean(kind)


def _is_integer(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind))


def _is_floating(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind))


def common_schema_of_blocks(name: str, schemas: Iterable[Any]) -> Any:
    """Return the schema that all blocks of a Ray dataset are converted to; None if they have one schema.

    Raises:
        ConfigError: A block has a further column, or no type holds a column's values of two blocks.
    """
    import pyarrow as pa

    known: list[Any] = []
    for schema in schemas:
        if isinstance(schema, pa.Schema) and not any(schema.equals(each) for each in known):
            known.append(schema)
    if len(known) < 2:
        return None
    return common_schema(name, known[0], [(f"block {number}", each) for number, each in enumerate(known)])
