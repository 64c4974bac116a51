"""Reads datasets that consist of files: each worker loads the parts that it needs. Worker side."""

from __future__ import annotations

import heapq
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from raysgd.data.order.epoch_order import EpochOrder
from raysgd.data.order.rank_assignment import RankAssignment
from raysgd.data.plan import FilePart, Source
from raysgd.data.reading.block_cache import MAX_LOADING, BlockCache
from raysgd.data.reading.columns import with_whole_columns
from raysgd.data.reading.readers import EpochSteps, SelectedRows, TableReader
from raysgd.data.reading.text import TextFormat
from raysgd.errors import DataError

#: Files whose metadata is kept in memory.
_MAX_FRAGMENTS = 64
#: Rows whose text in lists or structs is decoded together: pyarrow cannot divide it where it exceeds 2 GiB.
_NESTED_ROWS = 1024


@dataclass(frozen=True)
class FileReadOptions:
    """The formats and columns of a dataset's files, with which workers read them. Pickled by the driver.

    Attributes:
        schema: The `pyarrow.Schema` of the dataset.
        formats: Pairs of a `pyarrow.dataset.FileFormat` or `TextFormat`, and a `pyarrow.fs.FileSystem`.
        format_of: For each file the index of its pair; empty if there is only one pair.
        partitions: For each file the columns in its path, a `pyarrow.dataset.Expression`; empty if paths have no columns.
        filter: A `pyarrow.dataset.Expression` that rows must fulfil, or None.
    """

    schema: Any
    formats: tuple[tuple[Any, Any], ...]
    format_of: tuple[int, ...] = ()
    partitions: tuple[Any, ...] = ()
    filter: Any = None

    def size(self, path: str, number: int) -> int | None:
        """Return the current size of a file in bytes; None if its storage does not say, or the file is gone."""
        _, filesystem = self.format(number)
        size: int | None = filesystem.get_file_info(path).size
        return size

    def format(self, number: int) -> tuple[Any, Any]:
        """Return the format and the filesystem of a file."""
        return self.formats[self.format_of[number] if self.format_of else 0]

    def fragment(self, path: str, number: int) -> Any:
        """Return the `pyarrow.dataset.Fragment` of a whole file."""
        file_format, filesystem = self.format(number)
        partition = self.partitions[number] if self.partitions else None
        if partition is None:
            return file_format.make_fragment(path, filesystem)
        return file_format.make_fragment(path, filesystem, partition)


class FileBlocks:
    """Loads the blocks of a dataset that consists of files."""

    def __init__(self, name: str, source: Source) -> None:
        assert source.files is not None
        self._name = name
        self._parts: tuple[FilePart, ...] = source.blocks
        self._block_rows = source.stored_rows
        self._paths = source.files.paths
        self._sizes = source.files.sizes
        self._read_options: FileReadOptions = pickle.loads(source.files.read_options)
        self._fragments: OrderedDict[int, Any] = OrderedDict()

    @property
    def schema(self) -> Any:
        return self._read_options.schema

    def load(self, number: int, columns: Sequence[str]) -> Any:
        """Return a block as a Table of these columns. Safe to call from several threads.

        Raises:
            DataError: The file cannot be read, or has changed since the run began; the message has its path.
        """
        part = self._parts[number]
        path = self._paths[part.file]
        try:
            table = with_whole_columns(self._read(part, path, columns))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise DataError(f"dataset {self._name!r}: {path} cannot be read: {_first_line(error)}") from error
        if table.num_rows != self._block_rows[number]:
            raise self._changed_error(
                path, f"a part of it had {self._block_rows[number]} rows and now has {table.num_rows}"
            )
        return table

    def _changed_error(self, path: str, how: str) -> DataError:
        return DataError(
            f"dataset {self._name!r}: {path} has changed since the run began: {how}. Write new data to new files."
        )

    def _read(self, part: FilePart, path: str, columns: Sequence[str]) -> Any:
        size, before = self._read_options.size(path, part.file), self._sizes[part.file]
        if None not in (size, before) and size != before:  # a file that is gone raises when it is read
            raise self._changed_error(path, f"it had {before} bytes and now has {size}")
        file_format, filesystem = self._read_options.format(part.file)
        if isinstance(file_format, TextFormat):
            return self._read_text(file_format, filesystem, part, columns)
        fragment = self._fragment(part.file, path)
        if part.row_groups is not None:
            self._check_columns(fragment, columns)
            fragment = fragment.subset(row_group_ids=list(part.row_groups))
        read_options = self._read_options
        return fragment.to_table(
            schema=read_options.schema,
            columns=list(columns),
            filter=read_options.filter,
            batch_size=_batch_rows(read_options.schema, columns) if part.row_groups is not None else 2**17,
        )

    def _read_text(self, file_format: TextFormat, filesystem: Any, part: FilePart, columns: Sequence[str]) -> Any:
        options = self._read_options
        in_path = ds.get_partition_keys(options.partitions[part.file]) if options.partitions else {}
        stored = [each for each in options.schema if each.name not in in_path]
        wanted = [each for each in stored if each.name in columns] or stored[
            :1
        ]  # one column at least, for the row count
        table = file_format.read(filesystem, self._paths[part.file], part.span, pa.schema(wanted))
        for name in in_path:
            value = pa.scalar(in_path[name], options.schema.field(name).type)
            table = table.append_column(options.schema.field(name), pa.repeat(value, table.num_rows))
        return table.select(columns)

    def _check_columns(self, fragment: Any, columns: Sequence[str]) -> None:
        """Raise if a column is gone: pyarrow would fill it with nulls."""
        present = {*fragment.physical_schema.names, *ds.get_partition_keys(fragment.partition_expression)}
        for column in columns:
            if column not in present:
                raise ValueError(f"its column {column!r} is gone")

    def _fragment(self, number: int, path: str) -> Any:
        fragment = self._fragments.pop(number, None)
        if fragment is None:
            fragment = self._read_options.fragment(path, number)
        self._fragments[number] = fragment
        if len(self._fragments) > _MAX_FRAGMENTS:
            self._fragments.popitem(last=False)
        return fragment


def _batch_rows(schema: Any, columns: Sequence[str]) -> int:
    """Return how many rows pyarrow may decode together: those of 2 GiB of text or more if it is not in lists or structs."""
    kinds = [schema.field(column).type for column in columns]
    has_inner_text = any(
        pa.types.is_nested(each) and ("string" in str(each) or "binary" in str(each)) for each in kinds
    )
    return _NESTED_ROWS if has_inner_text else 2**31 - 1


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__


class FileSteps(EpochSteps):
    """The steps of an epoch over files: loads blocks ahead of the loop, and releases them behind it. For the reading thread.

    Args:
        assignment, order, start: See `EpochSteps`.
        on_release: Called with the number of each block that was released.
    """

    def __init__(
        self,
        blocks: BlockCache,
        block_rows: Sequence[int],
        assignment: RankAssignment,
        order: EpochOrder,
        start: int,
        on_release: Callable[[int], None],
    ) -> None:
        super().__init__(assignment, order, start)
        self._blocks = blocks
        self._on_release = on_release
        spans = order.spans(block_rows, assignment.lanes_of_rank(order.lanes))
        is_ahead = spans.until > start
        self._ahead = zip(spans.blocks[is_ahead].tolist(), spans.until[is_ahead].tolist(), strict=True)
        self._next: tuple[int, int] | None = next(self._ahead, None)
        # Blocks held from the previous epoch: those without rows in this epoch end at 0, and are released first.
        until = dict(zip(spans.blocks.tolist(), spans.until.tolist(), strict=True))
        self._ends = [(until.get(number, 0), number) for number in {*until, *blocks.held}]
        heapq.heapify(self._ends)
        self._seen_taken = -1

    def advance_to(self, place: int) -> None:
        """Release blocks behind this place if room is needed, and start to load blocks ahead of it."""
        is_all_needed = not self._ends or place < self._ends[0][0]
        if self._next is None or (self._blocks.num_taken == self._seen_taken and is_all_needed):
            return
        self._seen_taken = self._blocks.num_taken
        while self._next is not None and self._blocks.num_loading < MAX_LOADING:
            if not self._make_room(place) and self._blocks.num_loading:
                return
            number, until = self._next
            if until > place:  # else the loop was faster and has read the block itself
                self._blocks.load_ahead(number)
            self._next = next(self._ahead, None)

    def close(self) -> None:
        self._blocks.stop()

    def _make_room(self, place: int) -> bool:
        """Release blocks behind this place until one more fits. Others stay, since the next epoch will need them."""
        while not self._blocks.has_room() and self._ends and self._ends[0][0] <= place:
            _, number = heapq.heappop(self._ends)
            self._blocks.release(number)
            self._on_release(number)
        return self._blocks.has_room()


class FileReader(TableReader):
    """Reads some columns of the files, each part once per epoch, ahead of the loop.

    Args:
        columns: The columns to load; all by default.
        selected: See `TableReader`.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        files: FileBlocks,
        columns: Sequence[str] | None = None,
        selected: SelectedRows | None = None,
    ) -> None:
        names = list(files.schema.names if columns is None else columns)
        cache = BlockCache(lambda number: files.load(number, names))
        super().__init__(name, source, cache, files.schema, selected)
        self._files = files
        self._cache = cache
        self._reader_of: dict[tuple[str, ...], FileReader] = {tuple(names): self}

    def select(self, columns: Sequence[str]) -> FileReader:
        key = tuple(columns)
        if key not in self._reader_of:
            self._reader_of[key] = FileReader(self._name, self._source, self._files, key, self._selected_rows)
            self._reader_of[key].prefetchers = self.prefetchers
        return self._reader_of[key]

    def open_epoch(self, assignment: RankAssignment, order: Any, start: int) -> FileSteps:
        return FileSteps(self._cache, self._source.block_rows, assignment, order, start, self._forget_columns)

    def sample_row(self) -> int:
        held = self._cache.held
        if not held:
            return 0
        start = self._start(held[-1])
        return start if self._selected_rows is None else self._selected_rows.first_at_or_after(start)

    def close(self) -> None:
        self.prefetchers.stop()
        for reader in self._reader_of.values():
            reader._release_blocks()
