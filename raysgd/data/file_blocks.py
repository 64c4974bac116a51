"""Parts of files as Tables, read where they are needed. Worker side."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from raysgd.data.plan import FilePart, Source
from raysgd.errors import DataError

#: Files whose metadata are kept.
_OPEN_FILES = 64


@dataclass(frozen=True)
class Opening:
    """How the files of a dataset are read. Pickled by the driver.

    Attributes:
        schema: The dataset's, a `pyarrow.Schema`.
        formats: `pyarrow.dataset.FileFormat` and `pyarrow.fs.FileSystem`, as many pairs as the dataset has.
        format_of: Which of them each file has; empty where there is one.
        partitions: What each file's path says of its rows, a `pyarrow.dataset.Expression`; empty where paths say nothing.
        filter: Which rows are left out, or None.
    """

    schema: Any
    formats: tuple[tuple[Any, Any], ...]
    format_of: tuple[int, ...] = ()
    partitions: tuple[Any, ...] = ()
    filter: Any = None

    def size(self, path: str, number: int) -> int | None:
        """Bytes of a file now; None where its storage does not tell, or it is gone."""
        _, filesystem = self._format(number)
        size: int | None = filesystem.get_file_info(path).size
        return size

    def _format(self, number: int) -> tuple[Any, Any]:
        return self.formats[self.format_of[number] if self.format_of else 0]

    def fragment(self, path: str, number: int) -> Any:
        """The `pyarrow.dataset.Fragment` of a whole file."""
        file_format, filesystem = self._format(number)
        partition = self.partitions[number] if self.partitions else None
        if partition is None:
            return file_format.make_fragment(path, filesystem)
        return file_format.make_fragment(path, filesystem, partition)


class FileBlocks:
    """The blocks of a dataset that is made of files.

    Args:
        name: The dataset's, for messages.
        source: Of the kind ``files``.
    """

    def __init__(self, name: str, source: Source) -> None:
        assert source.files is not None
        self._name = name
        self._parts: tuple[FilePart, ...] = source.blocks
        self._block_rows = source.stored_rows
        self._paths = source.files.paths
        self._sizes = source.files.sizes
        self._opening: Opening = pickle.loads(source.files.opening)
        self._fragments: OrderedDict[int, Any] = OrderedDict()

    @property
    def schema(self) -> Any:
        return self._opening.schema

    def load(self, number: int, columns: Sequence[str]) -> Any:
        """A block as a Table of these columns, each in one chunk. May be called by several threads at a time.

        Raises:
            DataError: Its file cannot be read, or is another than when the run began; the message names it.
        """
        part = self._parts[number]
        path = self._paths[part.file]
        try:
            table = self._read(part, path, columns)
            if any(column.num_chunks != 1 for column in table.columns):
                table = table.combine_chunks()
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise DataError(f"dataset {self._name!r}: {path} cannot be read: {_first_line(error)}") from error
        if table.num_rows != self._block_rows[number]:
            raise self._changed(path, f"a part of it had {self._block_rows[number]} rows and has {table.num_rows}")
        return table

    def _changed(self, path: str, how: str) -> DataError:
        return DataError(
            f"dataset {self._name!r}: {path} has changed since the run began: {how} now. Write new data to new files."
        )

    def _read(self, part: FilePart, path: str, columns: Sequence[str]) -> Any:
        size, before = self._opening.size(path, part.file), self._sizes[part.file]
        if None not in (size, before) and size != before:  # one that is gone shows when it is read
            raise self._changed(path, f"it had {before} bytes and has {size}")
        fragment = self._fragment(part.file, path)
        if part.row_groups is not None:
            self._check_columns(fragment, columns)
            fragment = fragment.subset(row_group_ids=list(part.row_groups))
        opening = self._opening
        return fragment.to_table(
            schema=opening.schema,
            columns=list(columns),
            filter=opening.filter,
            batch_size=2**31 - 1 if part.row_groups is not None else 2**17,
        )

    def _check_columns(self, fragment: Any, columns: Sequence[str]) -> None:
        """What a file does not have any more would come as nulls."""
        there = {*fragment.physical_schema.names, *ds.get_partition_keys(fragment.partition_expression)}
        for column in columns:
            if column not in there:
                raise ValueError(f"it has no column {column!r} any more")

    def _fragment(self, number: int, path: str) -> Any:
        fragment = self._fragments.pop(number, None)
        if fragment is None:
            fragment = self._opening.fragment(path, number)
        self._fragments[number] = fragment
        if len(self._fragments) > _OPEN_FILES:
            self._fragments.popitem(last=False)
        return fragment


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
