"""Reads text files, CSV and JSON, in parts of whole records; pyarrow converts them to the types that the driver found.

Used by the driver, which finds the records and the types of their values, and by workers, which read parts. Rows are those
that Python's `csv` and `json` read. Each default of pyarrow that depends on the size or the order of rows is set here.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

#: Endings of compressed files, and what pyarrow calls the compression.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
#: Cells of CSV that mean no value in a column of numbers or booleans: those of pandas, except ``nan``, which is a number.
MISSING_CELLS = ("", "#N/A", "#N/A N/A", "#NA", "N/A", "NA", "NULL", "n/a", "null")
TRUE_CELLS = ("true", "True", "TRUE")
FALSE_CELLS = ("false", "False", "FALSE")
#: Bytes that are converted at a time, if records are not longer.
PIECE_BYTES = 32 * 2**20
#: Bytes in which the header is looked for first.
_HEADER_BYTES = 64 * 2**10
_BOM = b"\xef\xbb\xbf"
_QUOTE = ord('"')
#: What is before a quote that begins a cell, or before the second of two quotes that mean one.
_BEFORE_QUOTE = np.frombuffer(b',\n\r"', np.uint8)

#: ``lines`` has a JSON object in each line; ``document`` is one JSON value.
TextKind = Literal["csv", "lines", "document"]


@dataclass(frozen=True)
class TextFormat:
    """Describes how a text file is read.

    Attributes:
        kind: Its kind.
        header: The names of the columns of a CSV file, in their order.
    """

    kind: TextKind
    header: tuple[str, ...] = ()

    def read(self, filesystem: Any, path: str, span: tuple[int, int] | None, schema: Any) -> Any:
        """Return the records between two places of a file, or all of a compressed one, as a Table.

        Args:
            filesystem: The `pyarrow.fs.FileSystem`.
            path: The file.
            span: The places of the first record and behind the last one, in bytes; None for all records.
            schema: The columns to read.
        """
        if span is not None:
            with filesystem.open_input_file(path) as file:
                return self.convert(file.read_at(span[1] - span[0], span[0]), schema)
        pieces = [self.convert(data, schema) for *_, data in iter_records(filesystem, path, self.kind) if data]
        return pa.concat_tables(pieces) if pieces else schema.empty_table()

    def convert(self, data: bytes, schema: Any) -> Any:
        """Return complete records as a Table with the columns of ``schema``."""
        if self.kind == "csv":
            return self.cells(data, {field.name: field.type for field in schema}).cast(schema)
        try:
            if self.kind == "lines":
                return read_lines(data, schema).select(schema.names)
        except pa.ArrowInvalid:  # what json reads and pyarrow refuses, such as a key that comes twice
            pass
        rows = [row for _, row in self.rows(data, 1)]
        return pa.table([pa.array([row.get(each.name) for row in rows], each.type) for each in schema], schema=schema)

    def cells(self, data: bytes, types: dict[str, Any]) -> Any:
        """Return complete records of CSV as a Table of these columns."""
        return pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.header),
            pa.csv.ParseOptions(newlines_in_values=True),
            pa.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=MISSING_CELLS,
                true_values=TRUE_CELLS,
                false_values=FALSE_CELLS,
            ),
        )

    def rows(self, data: bytes, line: int) -> Iterator[tuple[int, Any]]:
        """Yield the number of the line and the row, for each row as `json` reads it; ``line`` is the number of the first.

        Raises:
            ValueError: The text is not JSON.
        """
        texts = [data] if self.kind == "document" else data.split(b"\n")
        for number, text in enumerate(texts, line):
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number + error.lineno - 1}, column {error.colno}: {error.msg}") from error
            is_many = self.kind == "document" and isinstance(value, list)
            yield from ((number, row) for row in (value if is_many else [value]))


def read_lines(data: bytes, schema: Any = None) -> Any:
    """Return JSON lines as a Table, as pyarrow reads them; with a ``schema``, its columns alone.

    Raises:
        pyarrow.ArrowInvalid: pyarrow cannot read them.
    """
    table = pa.json.read_json(
        pa.BufferReader(data),
        pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pa.json.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="infer" if schema is None else "ignore",
            newlines_in_values=True,
        ),
    )
    table.validate()  # lists that begin with null have too few values where pyarrow infers their type
    return table


def iter_records(
    filesystem: Any, path: str, kind: TextKind, size: int = PIECE_BYTES
) -> Generator[tuple[tuple[str, ...], int, int, bytes]]:
    """Yield complete records of a text file: the header of CSV, the place and the line of the first record, and their bytes.

    Args:
        filesystem: The `pyarrow.fs.FileSystem`.
        path: The file; it is decompressed as its ending says.
        kind: Its kind.
        size: Bytes of the records, about; more where a record is longer.

    Raises:
        ValueError: The header is not text.
    """
    header: tuple[str, ...] = ()
    line = 1
    compression = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    with filesystem.open_input_stream(path, compression=compression) as stream:
        for place, data in _iter_pieces(stream, size, kind):
            is_first = kind == "csv" and not header
            if is_first:
                header, start = _split_header(data)
                place, line, data = place + start, line + data.count(b"\n", 0, start), data[start:]
            if data or (is_first and header):  # also without rows: a header has columns
                yield header, place, line, data
            line += data.count(b"\n")


def _iter_pieces(stream: Any, size: int, kind: TextKind) -> Iterator[tuple[int, bytes]]:
    data = stream.read(len(_BOM))
    place = len(_BOM) if data == _BOM else 0
    data = b"" if place else data
    while more := stream.read() if kind == "document" else stream.read(max(size, len(data))):
        data += more
        end = 0 if kind == "document" else end_of_cells(data) if kind == "csv" else data.rfind(b"\n") + 1
        if end:
            yield place, data[:end]
            place, data = place + end, data[end:]
    if data:
        yield place, data


def _split_header(data: bytes) -> tuple[tuple[str, ...], int]:
    """Return the first record that is not empty, and the place behind it."""
    start = len(data) - len(data.lstrip(b"\r\n"))
    end = end_of_cells(data[start : start + _HEADER_BYTES]) or len(data)
    lines = io.StringIO(data[: start + end].decode(errors="surrogateescape"), newline="")
    reader = csv.reader(lines)
    names = next((names for names in reader if names), [])
    lines.seek(0)
    header = "".join(next(lines) for _ in range(reader.line_num)).encode(errors="surrogateescape")
    header.decode()  # fails where a name is not UTF-8
    return tuple(names), len(header)


def end_of_cells(data: bytes) -> int:
    """Return the place behind the last line break of CSV that is not within quotes; 0 if there is none."""
    end = data.rfind(b"\n") + 1
    if data.find(b'"', 0, end) < 0:
        return end
    quotes = _enclosing_quotes(data)
    while end:
        before = int(np.searchsorted(quotes, end))
        if before % 2 == 0:
            return end
        end = data.rfind(b"\n", 0, int(quotes[before - 1])) + 1
    return 0


def _enclosing_quotes(data: bytes) -> Any:
    """Return the places of the quotes by which `csv` begins and ends quoted text, in pairs."""
    characters = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(characters == _QUOTE)
    begins = quotes[::2]
    if np.isin(characters[begins[begins > 0] - 1], _BEFORE_QUOTE).all():
        return quotes
    places, found, at = quotes.tolist(), [], 0
    while at < len(places):  # some quotes are within cells without quotes, and mean themselves
        if places[at] and data[places[at] - 1] not in b",\n\r":
            at += 1
            continue
        found.append(places[at])
        at += 1
        while at + 1 < len(places) and places[at + 1] == places[at] + 1:  # two quotes mean one
            at += 2
        found += places[at : at + 1]
        at += 1
    return np.asarray(found)
