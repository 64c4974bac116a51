"""Results as JSON lines and as CSV files. Runs in the controller's helper process, so it outlives the driver."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raysgd.callbacks.folder import FileCallback, open_folder
from raysgd.callbacks.values import flatten, split_automatic, strict_json
from raysgd.config.checks import check_component, check_count
from raysgd.result import Result, RunInfo

_BLOCK_BYTES = 1 << 16
_FIRST_COLUMNS = ("training_iteration", "attempt")


class AppendFile:
    """A file to append lines to. An unfinished last line, left by a writer that was killed, is dropped.

    Each line is one unbuffered write, so a reader sees it at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        _drop_torn_line(path)

    def write_line(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode("utf-8", "replace"))
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:  # a full disk: remove the partial line, which the next one would continue
            self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
            raise

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(position - _BLOCK_BYTES, 0)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)


class JsonLinesCallback(FileCallback):
    """Writes ``{run_dir}/results.jsonl``, for ``pandas.read_json(path, lines=True)``, jq and the like.

    A line has the keys of the result as they are, nested dicts too, in standard JSON: NaN and infinities are ``null``, which
    `raysgd.load_run` reads from the run's own files as they were. Results that are repeated after a failure are further
    lines, with a higher ``attempt``; ``drop_duplicates("training_iteration", keep="last")`` keeps the valid ones. A later
    attempt appends to the same file.

    Args:
        filename: Name of the file in the run's folder.
        workers: Also write each rank's own metrics, as the lists ``workers`` and ``ranks``.
    """

    _writer: AppendFile | None = None

    def __init__(self, filename: str = "results.jsonl", *, workers: bool = False) -> None:
        self._filename = check_component("JsonLinesCallback(filename)", filename)
        self._workers = workers

    def on_run_start(self, info: RunInfo) -> None:
        self._folder = open_folder(info.run_dir)
        self._folder.fetch(self._filename)
        self._writer = AppendFile(self._folder.path / self._filename)

    def on_result(self, result: Result) -> None:
        if self._writer is None or self._folder is None:
            return
        record = {**result, "ranks": result.ranks, "workers": result.workers} if self._workers else result
        self._writer.write_line(strict_json(record))
        self._folder.sync()


class CsvCallback(FileCallback):
    """Writes ``{run_dir}/results.csv``, for ``pandas.read_csv(path)`` and spreadsheets.

    Nested metrics become columns such as ``val/loss``; lists are JSON text; None and absent metrics are empty cells; a
    line break in text is written as a backslash and n, so that a row is a line. Rows are appended. When a result
    has new metrics, the file is rewritten once with their columns, into a temporary file that then replaces it; so the bytes
    written grow with rows times the number of such results, which ``max_columns`` bounds. Results that are repeated after
    a failure are further rows, with a higher ``attempt``.

    Args:
        filename: Name of the file in the run's folder.
        max_columns: Largest number of columns; further metrics are left out with a warning.
    """

    _writer: _Table | None = None

    def __init__(self, filename: str = "results.csv", *, max_columns: int = 1000) -> None:
        self._filename = check_component("CsvCallback(filename)", filename)
        self._max_columns = check_count("CsvCallback(max_columns)", max_columns, minimum=1)

    def on_run_start(self, info: RunInfo) -> None:
        self._folder = open_folder(info.run_dir)
        self._folder.fetch(self._filename)
        self._writer = _Table(self._folder.path / self._filename, self._max_columns, self.warn)

    def on_result(self, result: Result) -> None:
        if self._writer is None or self._folder is None:
            return
        own, automatic = split_automatic(result)
        first = {key: automatic[key] for key in _FIRST_COLUMNS if key in automatic}
        self._writer.add({**first, **flatten(own), **automatic})
        self._folder.sync()


class _Table:
    """A CSV file that rows and columns are added to."""

    def __init__(self, path: Path, max_columns: int, warn: Callable[[str], None]) -> None:
        self._path = path
        self._max_columns = max_columns
        self._warn = warn
        self._warned = False
        self._file = AppendFile(path)
        self._columns: dict[str, None] = dict.fromkeys(_read_header(path))

    def add(self, row: dict[str, Any]) -> None:
        row = {_in_one_line(name): value for name, value in row.items()}
        if not row.keys() <= self._columns.keys():
            self._widen([key for key in row if key not in self._columns])
        self._file.write_line(_line([_cell(row.get(column)) for column in self._columns]))

    def close(self) -> None:
        self._file.close()

    def _widen(self, new: list[str]) -> None:
        room = self._max_columns - len(self._columns)
        if len(new) > room and not self._warned:
            self._warned = True
            self._warn(
                f"{self._path.name} has {self._max_columns} columns; further metrics are left out. "
                "CsvCallback(max_columns=...) sets the limit."
            )
        if added := new[: max(room, 0)]:
            columns = [*self._columns, *added]
            self._rewrite(columns, len(added))
            self._columns = dict.fromkeys(columns)

    def _rewrite(self, columns: list[str], num_added: int) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with open(self._path, "rb") as old, open(temporary, "wb") as new:
            old.readline()
            new.write(f"{_line(columns)}\n".encode("utf-8", "replace"))
            for row in old:  # rows are lines, so they need not be parsed, which csv refuses for long cells
                new.write(row.rstrip(b"\n") + b"," * num_added + b"\n")
        self._file.close()
        os.replace(temporary, self._path)
        self._file = AppendFile(self._path)


def _read_header(path: Path) -> list[str]:
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = strict_json(value) if isinstance(value, (list, tuple)) else str(value)
    return _in_one_line(text)


def _in_one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()
