"""Rows of a dataset by their index, from blocks that are fetched when they are first needed. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysgd.data.ahead import Making
from raysgd.data.columns import Column, open_column
from raysgd.data.ledger import Deal, Indices, as_range
from raysgd.data.names import column_of
from raysgd.data.parts import is_chosen
from raysgd.data.plan import Choice, Source
from raysgd.errors import ConfigError

Fetch = Callable[[Any], Any]
Arrays = dict[str, NDArray[Any]]
# A block's number, the rows wanted of it, and where they belong in the batch (None: one after the other).
_Piece = tuple[int, Indices, NDArray[np.int64] | None]


#: Some steps at a time, each as ``(this rank's rows, where the step ends)``.
Steps = Iterator[list[tuple[Indices, int]]]


class Follower:
    """Goes through what is left of an epoch, and is told where the loop is. This one needs nothing to be ready.

    Args:
        deal: Which rows this rank takes.
        order: Of the epoch.
        start: Where in it.
    """

    def __init__(self, deal: Deal, order: Any, start: int) -> None:
        self._deal = deal
        self._order = order
        self._start = start

    def steps(self) -> Steps:
        """The steps. May wait."""
        return self._deal.steps(self._order, self._start)

    def first(self) -> Indices | None:
        """This rank's rows in the first step, to be read at once; None where there is no step."""
        steps = next(iter(self.steps()), None)
        return steps[0][0] if steps else None

    def at(self, place: int) -> None:
        """The pass has come to this place."""

    def stop(self) -> None:
        """Whoever waits for something of this pass need not any more. Called in any thread."""

    def close(self) -> None:
        """The pass is over."""


class Blocks(Protocol):
    """Where a `TableReader` has its blocks from."""

    def get(self, number: int) -> Any:
        """A block, a Table or a dict of arrays, with at least the columns that are read."""

    def close(self) -> None:
        """Let go of what is held."""


class StoredBlocks:
    """Blocks in the object store. They are kept: views of shared memory, which every batch of a shuffled epoch needs again.

    Args:
        source: Of the kind ``arrow`` or ``arrays``.
        fetch: Gives what ``put`` stored.
    """

    def __init__(self, source: Source, fetch: Fetch) -> None:
        self._refs = source.blocks
        self._fetch = fetch
        self._blocks: dict[int, Any] = {}

    def get(self, number: int) -> Any:
        if number not in self._blocks:
            self._blocks[number] = self._fetch(self._refs[number])
        return self._blocks[number]

    def close(self) -> None:
        self._blocks.clear()


class TableReader:
    """Rows of a dataset that is made of Tables or of dicts of arrays.

    Args:
        name: The dataset's, for messages.
        source: What is known of its blocks.
        blocks: The blocks.
        schema: Where it is known without a look at them.
        chosen: Which rows they are, of a part of a dataset.
    """

    def __init__(
        self, name: str, source: Source, blocks: Blocks, schema: Any = None, chosen: ChosenRows | None = None
    ) -> None:
        self._name = name
        self._source = source
        self._blocks = blocks
        self._ends = np.cumsum(source.stored_rows, dtype=np.int64)
        self._starts = self._ends - np.asarray(source.stored_rows, np.int64)
        self._chosen = chosen
        self._columns: dict[int, dict[str, Column]] = {}
        self._schema = schema
        self.making = Making()

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema`; a dataset without blocks has no columns."""
        if self._schema is None:
            some = range(min(1, self._source.num_rows))
            table = self.table(some, self.columns) if self._source.blocks else pa.table({})
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
        """A reader that need not have any other columns."""
        return self

    def follow(self, deal: Deal, order: Any, start: int) -> Follower:
        """Be ready for a pass through an epoch."""
        return Follower(deal, order, start)

    def peek(self, deal: Deal, order: Any) -> Follower:
        """Be ready for a look at the first rows of an epoch."""
        return self.follow(deal, order, 0)

    def close(self) -> None:
        """Let go of the blocks, until they are needed again, and make no more batches ahead."""
        self.making.stop()
        self._let_go()

    def _let_go(self) -> None:
        self._columns.clear()
        self._blocks.close()

    def sample_row(self) -> int:
        """A row that can be had without waiting, where there is one; the dataset has rows."""
        return 0

    def _forget(self, number: int) -> None:
        """This block is not held any more."""
        self._columns.pop(number, None)

    def arrays(self, rows: Indices, columns: Sequence[str], *, dense: bool = False) -> Arrays:
        """A NumPy array for each column. A range of rows of one block is a read-only view. ``dense``: see `Column`."""
        pieces = self._pieces(rows)
        return {column: self._array(pieces, len(rows), column, dense) for column in columns}

    def table(self, rows: Indices, columns: Sequence[str]) -> Any:
        """A `pyarrow.Table`; a range of rows refers to the blocks."""
        if self._source.kind == "arrays":
            arrays = self.arrays(rows, columns)
            return pa.table({column: self._as_arrow(column, array) for column, array in arrays.items()})
        parts, places = [], []
        for number, wanted, at in self._pieces(rows):
            block = self._blocks.get(number).select(columns)
            if isinstance(wanted, range):
                parts.append(block.slice(wanted.start, len(wanted)))
            else:
                parts.append(block.take(pa.array(wanted)))
            if at is not None:
                places.append(at)
        table = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        if not places:
            return table
        return table.take(pa.array(np.argsort(np.concatenate(places), kind="stable")))

    def frame(self, rows: Indices, columns: Sequence[str]) -> Any:
        """A pandas DataFrame; what has more than one axis becomes a column of arrays."""
        if self._source.kind != "arrays":
            return self.table(rows, columns).to_pandas()
        import pandas as pd

        arrays = self.arrays(rows, columns)
        return pd.DataFrame({name: array if array.ndim == 1 else list(array) for name, array in arrays.items()})

    def _array(self, pieces: list[_Piece], num_rows: int, column: str, dense: bool) -> NDArray[Any]:
        taken = [self._column(number, column).take(rows, dense=dense) for number, rows, _ in pieces]
        if len(taken) == 1:
            return taken[0]
        self._check_alike(taken, column)
        if pieces[0][2] is None:
            return np.concatenate(taken)
        whole = np.empty((num_rows, *taken[0].shape[1:]), taken[0].dtype)
        for part, (_, _, at) in zip(taken, pieces, strict=True):
            whole[at] = part
        return whole

    def _check_alike(self, taken: list[NDArray[Any]], column: str) -> None:
        kinds = {(array.dtype, array.shape[1:]) for array in taken}
        if len(kinds) > 1:
            told = " and ".join(sorted(f"{dtype} of shape {shape}" for dtype, shape in kinds))
            raise ConfigError(f"{column_of(self._name, column)} has rows of {told} in one batch; give all the same.")

    def _pieces(self, rows: Indices) -> list[_Piece]:
        if not len(rows):
            sample = self._stored(range(self.sample_row(), self.sample_row() + 1))[0] if len(self._ends) else 0
            return [(int(np.searchsorted(self._ends, sample, side="right")), rows, None)]
        rows = self._stored(rows)
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

    def _stored(self, rows: Indices) -> Indices:
        """Where these rows are in the blocks."""
        return rows if self._chosen is None else self._chosen(rows)

    def _spans(self, rows: range) -> list[_Piece]:
        first, last = np.searchsorted(self._ends, [rows.start, rows.stop - 1], side="right").tolist()
        spans: list[_Piece] = []
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
                    f"{column_of(self._name, column)} is missing from block {number}; it has {block.column_names}."
                )
            opened[column] = open_column(block, column, column_of(self._name, column))
        return opened[column]

    def _as_arrow(self, column: str, array: NDArray[Any]) -> Any:
        try:
            if array.ndim > 1:
                return pa.FixedShapeTensorArray.from_numpy_ndarray(array)
            return pa.array(array)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(f"{column_of(self._name, column)} cannot be an Arrow column: {error}") from error


class ChosenRows:
    """The rows of a part of a dataset, in the order of the whole.

    Args:
        choice: Which they are.
        fetch: Gives what ``put`` stored.
    """

    def __init__(self, choice: Choice, fetch: Fetch) -> None:
        self._choice = choice
        self._fetch = fetch
        self._rows: NDArray[np.int64] | None = None

    def __call__(self, rows: Indices) -> Indices:
        """Rows of the whole by rows of the part."""
        found = self._all[rows.start : rows.stop] if isinstance(rows, range) else self._all[rows]
        return as_range(found) if isinstance(rows, range) else found

    def at_or_after(self, row: int) -> int:
        """The first row of the part that is not before a row of the whole."""
        return int(np.searchsorted(self._all, row))

    @property
    def _all(self) -> NDArray[np.int64]:
        if self._rows is None:
            choice = self._choice
            self._rows = np.flatnonzero(is_chosen(self._fetch(choice.folds), choice.fold, choice.is_rest))
        return self._rows


class ItemReader:
    """Rows of a map-style dataset, which every worker holds and indexes."""

    def __init__(self, source: Source, fetch: Fetch, chosen: ChosenRows | None = None) -> None:
        self._source = source
        self._chosen = chosen
        self._fetch = fetch
        self._dataset: Any = None
        self.making = Making()

    def items(self, rows: Iterable[int] | Indices) -> list[Any]:
        if self._dataset is None:
            self._dataset = self._fetch(self._source.blocks[0])
        wanted = [int(row) for row in rows]
        if self._chosen is not None:
            wanted = [int(row) for row in self._chosen(np.asarray(wanted, np.int64))]
        if hasattr(self._dataset, "__getitems__"):  # torch's way to read a batch at once
            return list(self._dataset.__getitems__(wanted))
        return [self._dataset[row] for row in wanted]

    def follow(self, deal: Deal, order: Any, start: int) -> Follower:
        """As a `TableReader`'s."""
        return Follower(deal, order, start)

    def peek(self, deal: Deal, order: Any) -> Follower:
        """As a `TableReader`'s."""
        return Follower(deal, order, 0)

    def sample_row(self) -> int:
        """As a `TableReader`'s."""
        return 0

    def close(self) -> None:
        """Let go of the dataset, until it is needed again, and make no more batches ahead."""
        self.making.stop()
        self._dataset = None
