"""Reads CSV and JSON files once: finds where their records are, counts them, and finds types for all values. Driver side."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds

from raysgd._util.text import with_article
from raysgd.data.plan import FilePart
from raysgd.data.reading.files import FileReadOptions
from raysgd.data.reading.text import COMPRESSIONS, TextFormat, TextKind, end_of_cells, iter_records, read_lines
from raysgd.data.sources.value_types import (
    NULL,
    TEXT,
    TypeConflictError,
    ValueType,
    merge_fields,
    type_of_array,
    type_of_cells,
    type_of_value,
)
from raysgd.errors import ConfigError

#: Files that are read at a time: remote storage has long latencies.
NUM_READERS = 32
#: Threads that find types, and pieces of files that wait for one.
_NUM_PARSERS = min(8, os.cpu_count() or 1)
#: Bytes of a piece in which columns of text are looked for first.
_TRIED_BYTES = 64 * 2**10
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


class SizedPart(NamedTuple):
    """A part of a file with the number of its rows and its size in memory, about."""

    part: FilePart
    num_rows: int
    num_bytes: int


def unreadable_error(name: str, path: str, error: BaseException) -> ConfigError:
    """Return the error for a file that cannot be read."""
    kind = with_article(type(error).__name__)
    line = str(error).split("\n", 1)[0]
    return ConfigError(f"dataset {name!r}: {path} cannot be read because of {kind}: {line}")


@dataclass(frozen=True)
class TextFiles:
    """The parts of the text files of a dataset, and how workers read them.

    Attributes:
        sizes: Bytes of each file; None if its storage does not say.
        parts: Parts of the files that have rows, in order.
        nulls: How many nulls the columns of numbers have that have any.
        read_options: How workers read them.
    """

    sizes: tuple[int | None, ...]
    parts: list[SizedPart]
    nulls: dict[str, int | None]
    read_options: FileReadOptions


@dataclass(frozen=True)
class _Block:
    """Consecutive records of a file.

    Attributes:
        line: The line of the first record, from 1.
        types: Of the values of each column.
        num_missing: Rows in which a column has no value.
    """

    path: str
    format: TextFormat
    span: tuple[int, int]
    line: int
    num_rows: int
    types: dict[str, ValueType]
    num_missing: dict[str, int]


def scan_text_files(
    name: str, filesystem: Any, paths: Sequence[str], folder: str | None, kind: TextKind, part_bytes: int
) -> TextFiles:
    """Read all records of text files, in pieces, and find types that hold the values of all of them.

    Args:
        name: The dataset's name for messages.
        filesystem: The `pyarrow.fs.FileSystem`.
        paths: The files, all of one format.
        folder: The folder below which path parts of the form ``key=value`` are columns, if any.
        kind: ``csv`` or ``lines``; files of JSON may also be documents.
        part_bytes: Bytes of a part, about.

    Raises:
        ConfigError: A file cannot be read, or no type holds the values of a column.
    """
    with ThreadPoolExecutor(_NUM_PARSERS) as parsers, ThreadPoolExecutor(min(NUM_READERS, len(paths))) as readers:
        scan = _Scan(name, filesystem, kind, part_bytes, parsers)
        scanned = list(readers.map(scan.scan_file, paths))
    blocks = [block for file in scanned for block in file]
    if not blocks:
        raise ConfigError(
            f"dataset {name!r}: {paths[0]} is empty, as are the other files; give files with rows or a header."
        )
    partitioning = _partitioning(paths, folder)
    in_path = {field.name: field for field in partitioning.schema}
    types = scan.merge(blocks)
    fields = [pa.field(column, each.to_arrow()) for column, each in types.items() if column not in in_path]
    formats: list[TextFormat] = []
    for file in scanned:
        if file and file[0].format not in formats:
            formats.append(file[0].format)
    parts = [
        part
        for number, file in enumerate(scanned)
        for part in _parts(number, file, is_whole=_is_compressed(paths[number]))
    ]
    missing = {
        field.name: sum(block.num_missing.get(field.name, block.num_rows) for block in blocks)
        for field in fields
        if not pa.types.is_nested(field.type)
        and not pa.types.is_string(field.type)
        and not pa.types.is_null(field.type)
    }
    return TextFiles(
        scan.sizes(paths),
        parts,
        {column: count for column, count in missing.items() if count},
        FileReadOptions(
            schema=pa.schema([*fields, *in_path.values()]),
            formats=tuple((each, filesystem) for each in formats),
            format_of=tuple(formats.index(file[0].format) if file else 0 for file in scanned)
            if len(formats) > 1
            else (),
            partitions=tuple(partitioning.parse(path[len(folder or "") :]) for path in paths) if in_path else (),
        ),
    )


def _parts(number: int, blocks: Sequence[_Block], is_whole: bool) -> Iterator[SizedPart]:
    if is_whole or any(block.format.kind == "document" for block in blocks):
        num_bytes = sum(block.span[1] - block.span[0] for block in blocks)
        blocks_rows = sum(block.num_rows for block in blocks)
        found = [SizedPart(FilePart(number), blocks_rows, num_bytes)]
    else:
        found = [
            SizedPart(FilePart(number, span=block.span), block.num_rows, block.span[1] - block.span[0])
            for block in blocks
        ]
    yield from (part for part in found if part.num_rows)


def _is_compressed(path: str) -> bool:
    return path.lower().endswith(tuple(COMPRESSIONS))


def _partitioning(paths: Sequence[str], folder: str | None) -> Any:
    """Return the Hive partitioning of the paths, with integers where all values of a key are."""
    values: dict[str, set[str]] = {}
    for path in paths if folder else ():
        for part in path[len(folder or "") :].split("/")[:-1]:
            key, equals, value = part.partition("=")
            if equals:
                values.setdefault(unquote(key), set()).add(unquote(value))
    fields = [(key, _partition_type(each - {_NULL_FOLDER})) for key, each in values.items()]
    return ds.partitioning(pa.schema(fields), flavor="hive")


def _partition_type(values: set[str]) -> Any:
    try:
        pa.array(sorted(values), pa.string()).cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int32()


#: Rows, the types of columns, and the rows in which they have no value.
_Found = tuple[int, dict[str, ValueType], dict[str, int]]


class _Scan:
    """Reads the files of a dataset. Pieces of all files are parsed by one pool of threads, and only some are held at a time."""

    def __init__(
        self, name: str, filesystem: Any, kind: TextKind, part_bytes: int, parsers: ThreadPoolExecutor
    ) -> None:
        self._name = name
        self._filesystem = filesystem
        self._kind = kind
        self._part_bytes = part_bytes
        self._held = BoundedSemaphore(2 * _NUM_PARSERS)
        self._parsers = parsers
        self._sizes: dict[str, int | None] = {}

    def sizes(self, paths: Sequence[str]) -> tuple[int | None, ...]:
        return tuple(self._sizes[path] for path in paths)

    def scan_file(self, path: str) -> list[_Block]:
        """Return the blocks of a file."""
        try:
            # The size is read first, so that workers notice a change that happens while the driver reads.
            self._sizes[path] = self._filesystem.get_file_info(path).size
            return [future.result() for future in self._submit(path)]
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise unreadable_error(self._name, path, error) from error

    def _submit(self, path: str) -> list[Future[_Block]]:
        futures: list[Future[_Block]] = []
        kind = self._kind_of(path)
        for header, place, line, data in iter_records(self._filesystem, path, kind, self._part_bytes):
            self._held.acquire()
            span = (place, place + len(data))
            futures.append(self._parsers.submit(self._parse, path, TextFormat(kind, header), span, line, data))
        return futures

    def _kind_of(self, path: str) -> TextKind:
        if self._kind == "csv":
            return "csv"
        with closing(iter_records(self._filesystem, path, "lines", 1)) as records:
            first = next((data for *_, data in records if data.strip()), b"")
        try:
            return "lines" if isinstance(json.loads(first), dict) else "document"
        except (
            ValueError
        ) as error:  # an object that continues in the next line makes a document; else the line is broken
            is_open = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
            return "document" if is_open else "lines"

    def _parse(self, path: str, file_format: TextFormat, span: tuple[int, int], line: int, data: bytes) -> _Block:
        try:
            find = self._find_cells if file_format.kind == "csv" else self._find_values
            data.decode()  # pyarrow does not check the encoding of JSON, nor of columns that are left out
            num_rows, types, num_missing = find(path, file_format, data, line)
            return _Block(path, file_format, span, line, num_rows, types, num_missing)
        except UnicodeDecodeError as error:
            line += data.count(b"\n", 0, error.start)
            raise ConfigError(
                f"dataset {self._name!r}: {path}, line {line} is not UTF-8 text ({error.reason}): convert the file to UTF-8."
            ) from error
        finally:
            self._held.release()

    def _find_cells(self, path: str, file_format: TextFormat, data: bytes, line: int) -> _Found:
        header = file_format.header
        for column in header:
            if header.count(column) > 1:
                raise ConfigError(
                    f"dataset {self._name!r}: {path} has {header.count(column)} columns named {column!r}; rename all but one."
                )
        if not data:
            return 0, dict.fromkeys(header, NULL), dict.fromkeys(header, 0)
        begin = data[: end_of_cells(data[:_TRIED_BYTES])] or data
        try:
            tried = self._types_of(file_format, begin, header)[1]
            texts = {name: kind_and_count for name, kind_and_count in tried.items() if kind_and_count == (TEXT, 0)}
            num_rows, others = self._types_of(file_format, data, [each for each in header if each not in texts])
        except pa.ArrowInvalid as error:
            raise self._ragged_error(path, file_format, data, line) or error from error
        found = {**texts, **others}
        return num_rows, {each: found[each][0] for each in header}, {each: found[each][1] for each in header}

    @staticmethod
    def _types_of(
        file_format: TextFormat, data: bytes, columns: Sequence[str]
    ) -> tuple[int, dict[str, tuple[ValueType, int]]]:
        """Return the number of records of CSV, and for each of these columns its type and how many cells are missing."""
        read = columns or file_format.header[:1]  # one column at least, for the row count
        table = file_format.cells(data, dict.fromkeys(read, pa.string()))
        return table.num_rows, {each: type_of_cells(table.column(each).combine_chunks()) for each in columns}

    def _ragged_error(self, path: str, file_format: TextFormat, data: bytes, line: int) -> ConfigError | None:
        """Return the error for a row that has more or fewer cells than the header; None if there is no such row."""
        reader = csv.reader(io.StringIO(data.decode(), newline=""))
        before, num_columns = 0, len(file_format.header)
        with suppress(csv.Error):
            for cells in reader:
                if cells and len(cells) != num_columns:
                    return ConfigError(
                        f"dataset {self._name!r}: {path}, line {line + before} has {len(cells)} cells and the header has "
                        f"{num_columns}: quote cells with commas or line breaks, and close quotes."
                    )
                before = reader.line_num
        return None

    def _find_values(self, path: str, file_format: TextFormat, data: bytes, line: int) -> _Found:
        if file_format.kind == "lines":
            with suppress(pa.ArrowInvalid):
                table = read_lines(data)
                columns = {each: table.column(each).combine_chunks() for each in table.column_names}
                found = {each: type_of_array(column) for each, column in columns.items()}
                types = {each: kind for each, kind in found.items() if kind is not None}
                if len(types) == len(found):
                    return table.num_rows, types, {each: column.null_count for each, column in columns.items()}
        return self._read_values(path, file_format, data, line, {})

    def _read_values(
        self, path: str, file_format: TextFormat, data: bytes, line: int, types: dict[str, ValueType]
    ) -> _Found:
        """Read rows as `json` does, which is slow and knows the line of each; ``types`` are those of rows before."""
        num_rows, num_present = 0, dict.fromkeys(types, 0)
        for number, row in file_format.rows(data, line):
            where = f"dataset {self._name!r}: {path}, line {number}"
            if not isinstance(row, dict):
                kind = with_article(type(row).__name__)
                raise ConfigError(f"{where} has {kind} and not an object: give a JSON object for each row.")
            num_rows += 1
            try:
                types = merge_fields(types, type_of_value(row, (path, number)).fields)
            except TypeConflictError as error:
                raise ConfigError(f"dataset {self._name!r}: {error}") from None
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{where} has half of a surrogate pair, which is not a character: {error}."
                ) from error
            for key, value in row.items():
                num_present[key] = num_present.get(key, 0) + (value is not None)
        return num_rows, types, {key: num_rows - count for key, count in num_present.items()}

    def merge(self, blocks: Sequence[_Block]) -> dict[str, ValueType]:
        """Return the types of the columns of all blocks.

        Raises:
            ConfigError: No type holds the values of a column, or a CSV file has other columns than the others.
        """
        types: dict[str, ValueType] = {}
        for number, block in enumerate(blocks):
            if self._kind == "csv":
                self._check_columns(block, types or block.types)
            types = {**types, **{each: self._merge_column(each, types, block, blocks[:number]) for each in block.types}}
        if self._kind == "csv":  # what has no values at all is text, since an empty cell is
            types = {each: TEXT if kind.kind == "null" else kind for each, kind in types.items()}
        return types

    def _merge_column(
        self, column: str, types: dict[str, ValueType], block: _Block, before: Sequence[_Block]
    ) -> ValueType:
        if column not in types:
            return block.types[column]
        try:
            return types[column].merge(block.types[column])
        except TypeConflictError:
            if self._kind == "csv":
                return TEXT
            raise self._conflict_error(column, block, before) from None

    def _conflict_error(self, column: str, block: _Block, before: Sequence[_Block]) -> ConfigError:
        """Return the error that names the lines of two values that no type holds."""
        for other in before:
            try:
                other.types.get(column, block.types[column]).merge(block.types[column])
            except TypeConflictError as error:
                conflict = error
                break
        try:
            _, types, _ = self._read_values(other.path, other.format, self._reread(other), other.line, {})
            self._read_values(block.path, block.format, self._reread(block), block.line, types)
        except ConfigError as error:
            return error
        return ConfigError(f"dataset {self._name!r}: {TypeConflictError(column, conflict.one, conflict.other)}")

    def _reread(self, block: _Block) -> bytes:
        records = iter_records(self._filesystem, block.path, block.format.kind, self._part_bytes)
        return next(data for _, place, _, data in records if place == block.span[0])

    def _check_columns(self, block: _Block, types: dict[str, ValueType]) -> None:
        for column in types:
            if column not in block.types:
                raise self._columns_error(block, f"no column {column!r}, which other files have")
        for column in block.types:
            if column not in types:
                raise self._columns_error(block, f"a column {column!r}, which other files do not have")

    def _columns_error(self, block: _Block, has: str) -> ConfigError:
        return ConfigError(f"dataset {self._name!r}: {block.path} has {has}; give files with equal columns.")
