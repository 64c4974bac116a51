"""Readers: rows of a dataset by their index, from blocks that are fetched when they are first needed. Worker side."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysgd.data.order.epoch_order import Indices, as_range
from raysgd.data.order.rank_assignment import RankAssignment
from raysgd.data.plan import FoldSelection, Source, describe_column, select_rows
from raysgd.data.reading.columns import Column, is_list, nulls_message, open_column, take_rows
from raysgd.data.reading.prefetch import Prefetchers
from raysgd.errors import ConfigError

#: Returns the object that ``put`` stored.
Fetch = Callable[[Any], Any]
Arrays = dict[str, NDArray[Any]]
#: A block's number, the wanted rows of it, and their indices in the batch (None: one after the other).
_BlockRows = tuple[int, Indices, NDArray[np.int64] | None]
#: Lists of steps, each as ``(rows of this rank, end of the step)``.
Steps = Iterator[list[tuple[Indices, int]]]


class EpochSteps:
    """The steps in the rest of an epoch. Subclasses load blocks ahead of the loop; this one has nothing to load.

    Args:
        assignment: Which rows this rank takes.
        order: Order of the epoch.
        start: The place where the steps begin.
    """

    def __init__(self, assignment: RankAssignment, order: Any, start: int) -> None:
        self._assignment = assignment
        self._order = order
        self._start = start

    def steps(self) -> Steps:
        """Yield the steps. May wait for data."""
        return self._assignment.steps(self._order, self._start)

    def first_rows(self) -> Indices | None:
        """Return this rank's rows in the first step, which are read next; None if there is no step."""
        steps = next(iter(self.steps()), None)
        return steps[0][0] if steps else None

    def advance_to(self, place: int) -> None:
        """Record that the loop has reached this place."""

    def stop(self) -> None:
        """Release threads that wait for data of these steps. May be called in any thread."""

    def close(self) -> None:
        """End the steps and release what was loaded for them."""


class Blocks(Protocol):
    """A source of blocks for a `TableReader`."""

    def get(self, number: int) -> Any:
        """Return a block, a Table or a dict of arrays, with at least the columns that are read."""

    def close(self) -> None:
        """Release all blocks."""


class StoredBlocks:
    """Blocks in the object store. They are kept: they are views of shared memory, and shuffled epochs need all of them."""

    def __init__(self, name: str, source: Source, fetch: Fetch) -> None:
        self._name = name
        self._refs = source.blocks
        self._fetch = fetch
        self._schema = None if source.schema is None else pickle.loads(source.schema)
        self._blocks: dict[int, Any] = {}

    def get(self, number: int) -> Any:
        if number not in self._blocks:
            block = self._fetch(self._refs[number])
            self._blocks[number] = block if self._schema is None else self._converted(block, self._schema)
        return self._blocks[number]

    def _converted(self, block: Any, schema: Any) -> Any:
        columns = []
        for field in schema:
            try:
                columns.append(block.column(field.name).cast(field.type))
            except (pa.ArrowException, KeyError) as error:
                raise ConfigError(
                    f"{describe_column(self._name, field.name)} cannot have the type {field.type} in all blocks: {error}. Give "
                    "it one type."
                ) from error
        return pa.table(columns, schema=schema)

    def close(self) -> None:
        self._blocks.clear()


class TableReader:
    """Reads rows of a dataset whose blocks are Tables or dicts of arrays.

    Args:
        schema: The `pyarrow.Schema`, if it is known without reading a block.
        selected: The rows of a subset; None for all rows.
    """

    def __init__(
        self, name: str, source: Source, blocks: Blocks, schema: Any = None, selected: SelectedRows | None = None
    ) -> None:
        self._name = name
        self._source = source
        self._blocks = blocks
        self._ends = np.cumsum(source.stored_rows, dtype=np.int64)
        self._starts = self._ends - np.asarray(source.stored_rows, np.int64)
        self._selected_rows = selected
        self._columns: dict[int, dict[str, Column]] = {}
        self._schema = schema
        self._types: dict[str, Any] = {}  # of the columns, in all blocks that were read
        self.prefetchers = Prefetchers()

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema`; a dataset without blocks has no columns."""
        if self._schema is None:
            first_row = range(min(1, self._source.num_rows))
            table = self.table(first_row, self.columns) if self._source.blocks else pa.table({})
            self._schema = table.schema.remove_metadata()
        return self._schema

    @property
    def columns(self) -> list[str]:
        if self._schema is not None:
            return list(self._schema.names)
        if not self._source.blocks:
            return []
        first = self._blocks.get(0)
        return list(first) if isinstance(first, dict) else list(first.column_names)

    def select(self, columns: Sequence[str]) -> TableReader:
        """Return a reader that loads at least these columns; it may leave others out."""
        return self

    def open_epoch(self, assignment: RankAssignment, order: Any, start: int) -> EpochSteps:
        """Return the steps of an epoch from ``start`` on. Reading may run ahead of the loop until they are closed."""
        return EpochSteps(assignment, order, start)

    def open_peek(self, assignment: RankAssignment, order: Any) -> EpochSteps:
        """Return the steps of an epoch for reading its first rows alone."""
        return self.open_epoch(assignment, order, 0)

    def close(self) -> None:
        """Release the blocks and stop prefetching. The reader can be used again."""
        self.prefetchers.stop()
        self._release_blocks()

    def check_numbers(self, columns: Sequence[str]) -> None:
        """Check that these columns have no nulls where NumPy has no value for them, as far as that is known before reading.

        Raises:
            ConfigError: A column has nulls.
        """
        for column in columns:
            if count := (self._source.nulls or {}).get(column):
                kind = self.schema.field(column).type
                raise ConfigError(
                    nulls_message(describe_column(self._name, column), count, self._source.num_rows, kind)
                )

    def _release_blocks(self) -> None:
        self._columns.clear()
        self._blocks.close()

    def sample_row(self) -> int:
        """Return a row that needs no waiting, if there is one. The dataset has at least one row."""
        return 0

    def _forget_columns(self, number: int) -> None:
        """Drop the opened columns of a block that was released."""
        self._columns.pop(number, None)

    def arrays(self, rows: Indices, columns: Sequence[str], *, dense: bool = False) -> Arrays:
        """Return a NumPy array per column. A range of rows of one block is a read-only view. For ``dense`` see `Column`."""
        located = self._locate(rows)
        return {column: self._array(located, len(rows), column, dense) for column in columns}

    def table(self, rows: Indices, columns: Sequence[str]) -> Any:
        """Return a `pyarrow.Table`. A range of rows refers to the blocks' memory."""
        if self._source.kind == "arrays":
            arrays = self.arrays(rows, columns)
            return pa.table({column: self._as_arrow(column, array) for column, array in arrays.items()})
        parts, places = [], []
        for number, wanted, at in self._locate(rows):
            block = self._blocks.get(number).select(columns)
            for column in columns:
                self._check_type(number, block, column)
            parts.append(take_rows(block, wanted))
            if at is not None:
                places.append(at)
        table = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        if not places:
            return table
        return take_rows(table, np.argsort(np.concatenate(places), kind="stable"))

    def frame(self, rows: Indices, columns: Sequence[str]) -> Any:
        """Return a pandas DataFrame. Rows with axes of their own become a column of arrays.

        A column has one type in all batches: integers and booleans that may have nulls get pandas's nullable types, and
        dictionaries become their values.
        """
        import pandas as pd

        if self._source.kind != "arrays":
            table = self.table(rows, columns)
            for column in columns:
                if is_list(table.schema.field(column).type) and _has_gaps(table.column(column)):
                    raise ConfigError(
                        f"{describe_column(self._name, column)} has nulls within its lists of whole numbers, which pandas would "
                        "round. Read it with iter_batches(format='pyarrow'), or fill them before the run."
                    )
            own = [column for column in columns if self._has_own_type(column, table.schema.field(column).type)]
            frame = table.drop_columns(own).to_pandas() if own else table.to_pandas()
            if not own:
                return frame
            series = {column: self._nullable(table.column(column)) for column in own}
            return pd.DataFrame({column: series[column] if column in series else frame[column] for column in columns})
        arrays = self.arrays(rows, columns)
        return pd.DataFrame({name: array if array.ndim == 1 else list(array) for name, array in arrays.items()})

    def _has_own_type(self, column: str, kind: Any) -> bool:
        """Whether pandas's type of a column would depend on the values of a batch."""
        if pa.types.is_dictionary(kind):
            return True
        nulls = self._source.nulls
        may_have_nulls = nulls is None or column in nulls
        return may_have_nulls and (pa.types.is_integer(kind) or pa.types.is_boolean(kind))

    def _nullable(self, column: Any) -> Any:
        """Return a column as a pandas Series of a type that does not depend on its values."""
        import pandas as pd

        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if pa.types.is_boolean(kind):
            return column.to_pandas(types_mapper=lambda _: pd.BooleanDtype())
        if pa.types.is_integer(kind):
            name = f"{'UInt' if pa.types.is_unsigned_integer(kind) else 'Int'}{kind.bit_width}"
            return column.to_pandas(types_mapper=lambda _: pd.api.types.pandas_dtype(name))
        return column.to_pandas()

    def _array(self, located: list[_BlockRows], num_rows: int, column: str, dense: bool) -> NDArray[Any]:
        taken = [self._column(number, column).take(rows, dense=dense) for number, rows, _ in located]
        if len(taken) == 1:
            return taken[0]
        self._check_same_type(taken, column)
        if located[0][2] is None:
            return np.concatenate(taken)
        whole = np.empty((num_rows, *taken[0].shape[1:]), taken[0].dtype)
        for part, (_, _, at) in zip(taken, located, strict=True):
            whole[at] = part
        return whole

    def _check_same_type(self, taken: list[NDArray[Any]], column: str) -> None:
        kinds = {(array.dtype, array.shape[1:]) for array in taken}
        if len(kinds) > 1:
            listed = " and ".join(sorted(f"{dtype} of shape {shape}" for dtype, shape in kinds))
            raise ConfigError(
                f"{describe_column(self._name, column)} has rows of {listed} in one batch; give all rows one type and shape."
            )

    def _locate(self, rows: Indices) -> list[_BlockRows]:
        """Return which rows of which blocks make up the batch."""
        if not len(rows):
            sample = self._stored_rows(range(self.sample_row(), self.sample_row() + 1))[0] if len(self._ends) else 0
            return [(int(np.searchsorted(self._ends, sample, side="right")), rows, None)]
        rows = self._stored_rows(rows)
        if len(self._ends) <= 1:
            return [(0, rows, None)]
        if isinstance(rows, range):
            return self._spans(rows)
        wanted = np.asarray(rows, np.int64)
        numbers = np.searchsorted(self._ends, wanted, side="right")
        found = np.unique(numbers).tolist()
        if len(found) == 1:
            return [(found[0], wanted - self._start(found[0]), None)]
        at = [(number, np.flatnonzero(numbers == number)) for number in found]
        return [(number, wanted[places] - self._start(number), places) for number, places in at]

    def _stored_rows(self, rows: Indices) -> Indices:
        """Return rows of the whole dataset, by rows of the subset that is read."""
        return rows if self._selected_rows is None else self._selected_rows(rows)

    def _spans(self, rows: range) -> list[_BlockRows]:
        first, last = np.searchsorted(self._ends, [rows.start, rows.stop - 1], side="right").tolist()
        spans: list[_BlockRows] = []
        for number in range(first, last + 1):
            start, stop = self._start(number), int(self._ends[number])
            spans.append((number, range(max(rows.start, start) - start, min(rows.stop, stop) - start), None))
        return spans

    def _start(self, number: int) -> int:
        return int(self._starts[number])

    def _column(self, number: int, column: str) -> Column:
        opened = self._columns.setdefault(number, {})
        if column not in opened:
            block = self._blocks.get(number)
            if not isinstance(block, dict) and column not in block.column_names:
                raise ConfigError(
                    f"{describe_column(self._name, column)} is missing from block {number}; it has {block.column_names}."
                )
            self._check_type(number, block, column)
            opened[column] = open_column(block, column, describe_column(self._name, column))
        return opened[column]

    def _check_type(self, number: int, block: Any, column: str) -> None:
        """Check that a column has the type of the blocks that were read before.

        Raises:
            ConfigError: It has another one.
        """
        found = _kind_of(block[column] if isinstance(block, dict) else block.schema.field(column).type)
        known = self._types.setdefault(column, found)
        if known != found:
            raise ConfigError(
                f"{describe_column(self._name, column)} has values of {found} in block {number} and {known} in others; give it "
                "one type and shape."
            )

    def _as_arrow(self, column: str, array: NDArray[Any]) -> Any:
        try:
            if array.ndim > 1:
                return pa.FixedShapeTensorArray.from_numpy_ndarray(array)
            return pa.array(array)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(
                f"{describe_column(self._name, column)} cannot be converted to an Arrow column: {error}. Read it with "
                "format='numpy', or leave it out: columns=[...]."
            ) from error


class SelectedRows:
    """The rows of a subset of a dataset, in the order of the whole dataset."""

    def __init__(self, selection: FoldSelection, fetch: Fetch) -> None:
        self._selection = selection
        self._fetch = fetch
        self._rows: NDArray[np.int64] | None = None

    def __call__(self, rows: Indices) -> Indices:
        """Return rows of the whole dataset, by rows of the subset."""
        found = self._all[rows.start : rows.stop] if isinstance(rows, range) else self._all[rows]
        return as_range(found) if isinstance(rows, range) else found

    def first_at_or_after(self, row: int) -> int:
        """Return the first row of the subset that does not come before ``row`` of the whole dataset."""
        return int(np.searchsorted(self._all, row))

    @property
    def _all(self) -> NDArray[np.int64]:
        if self._rows is None:
            selection = self._selection
            folds = self._fetch(selection.folds)
            self._rows = np.flatnonzero(select_rows(folds, selection.fold, selection.is_complement))
        return self._rows


class ItemReader:
    """Reads rows of a map-style dataset, which every worker holds in memory and indexes. See `TableReader` for the methods."""

    def __init__(self, source: Source, fetch: Fetch, selected: SelectedRows | None = None) -> None:
        self._source = source
        self._selected_rows = selected
        self._fetch = fetch
        self._dataset: Any = None
        self.prefetchers = Prefetchers()

    def items(self, rows: Iterable[int] | Indices) -> list[Any]:
        if self._dataset is None:
            self._dataset = self._fetch(self._source.blocks[0])
        wanted = [int(row) for row in rows]
        if self._selected_rows is not None:
            wanted = [int(row) for row in self._selected_rows(np.asarray(wanted, np.int64))]
        if hasattr(self._dataset, "__getitems__"):  # torch's optional method that reads a batch at once
            return list(self._dataset.__getitems__(wanted))
        return [self._dataset[row] for row in wanted]

    def open_epoch(self, assignment: RankAssignment, order: Any, start: int) -> EpochSteps:
        return EpochSteps(assignment, order, start)

    def open_peek(self, assignment: RankAssignment, order: Any) -> EpochSteps:
        return EpochSteps(assignment, order, 0)

    def sample_row(self) -> int:
        return 0

    def close(self) -> None:
        """Release the dataset and stop prefetching. The reader can be used again."""
        self.prefetchers.stop()
        self._dataset = None


def _kind_of(column: Any) -> str:
    """Return the type that the values of an array, or of an Arrow type, have for a loop."""
    if isinstance(column, np.ndarray):
        return f"{column.dtype} of shape {column.shape[1:]}"
    if pa.types.is_dictionary(column):
        column = column.value_type
    is_text = any(test(column) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))
    return "strings" if is_text or pa.types.is_null(column) else str(column)


def _has_gaps(column: Any) -> bool:
    """Whether lists of integers or booleans have nulls, for which pandas would take floating-point numbers."""
    for chunk in column.chunks:
        values = chunk
        while is_list(values.type):
            values = values.flatten()
        if (
            values is not chunk
            and values.null_count
            and (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type))
        ):
            return True
    return False
