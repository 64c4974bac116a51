"""Files that were given as a dataset: which there are, and how many rows each part of them has. Driver side.

Only metadata is read where the format has it, as Parquet does; of CSV and JSON lines the rows are counted.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from raysgd._util.wording import with_article
from raysgd.data.file_blocks import Opening
from raysgd.data.plan import FilePart, Files, Source
from raysgd.errors import ConfigError

#: Row groups of a file that follow each other are read together up to about this much.
PART_BYTES = 32 * 2**20
#: Files whose metadata are read at a time: storage far away answers late.
_READERS = 32

_FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "ipc",
    ".ipc": "ipc",
    ".feather": "ipc",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")

_Part = tuple[FilePart, int]


def source_of_paths(name: str, given: Any) -> Source:
    """The files at a path or URI, or at a list of them; of folders all files below that do not begin with ``.`` or ``_``.

    Parts of paths of the form ``key=value`` are columns.

    Raises:
        ConfigError: There is nothing, or what there is cannot be read as one dataset.
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    paths = [os.fspath(path) for path in (given if isinstance(given, list) else [given])]
    filesystem, files = _find(name, paths)
    formats = {path: _format_of(name, path) for path in files}
    if len(set(formats.values())) > 1:
        first = files[0]
        other = next(path for path in files if formats[path] != formats[first])
        raise ConfigError(f"dataset {name!r} has files of several formats, {first} and {other}; give those of one.")
    try:
        dataset = ds.dataset(files, filesystem=filesystem, format=formats[files[0]], partitioning="hive")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(name, files[0], error) from error
    return source_of_dataset(name, dataset)


def source_of_dataset(name: str, dataset: Any) -> Source:
    """The files of a `pyarrow.dataset.Dataset`.

    Raises:
        ConfigError: A file cannot be read, or lacks a column.
    """
    schema = dataset.schema
    condition = dataset._scan_options.get("filter")  # where dataset.filter(...) keeps it; pyarrow has no way to ask
    plain = dataset.replace_schema(schema)  # a copy
    plain._scan_options = {}  # one that is filtered gives no fragments
    fragments = list(plain.get_fragments())
    with ThreadPoolExecutor(min(_READERS, max(1, len(fragments)))) as pool:
        parts = list(
            pool.map(
                lambda number: _parts_of(name, number, fragments[number], schema, condition), range(len(fragments))
            )
        )
    counted = [(part, rows) for part, rows in chain.from_iterable(parts) if rows]
    formats: list[tuple[Any, Any]] = []
    format_of = [_index(formats, (fragment.format, fragment.filesystem)) for fragment in fragments]
    partitions = [fragment.partition_expression for fragment in fragments]
    opening = Opening(
        schema=schema,
        formats=tuple(formats),
        format_of=tuple(format_of) if len(formats) > 1 else (),
        partitions=tuple(partitions) if any(str(each) != "true" for each in partitions) else (),
        filter=condition,
    )
    return Source(
        "files",
        tuple(part for part, _ in counted),
        tuple(rows for _, rows in counted),
        Files(tuple(fragment.path for fragment in fragments), pickle.dumps(opening)),
    )


def _find(name: str, paths: Sequence[str]) -> tuple[Any, list[str]]:
    from pyarrow import fs

    filesystem: Any = None
    files: list[str] = []
    for given in paths:
        try:
            found, path = fs.FileSystem.from_uri(given) if "://" in given else (fs.LocalFileSystem(), _local(given))
            info = found.get_file_info(path)
        except (OSError, ValueError) as error:
            raise _unreadable(name, given, error) from error
        if filesystem is not None and found != filesystem:
            raise ConfigError(
                f"dataset {name!r} has paths on several storages, {paths[0]} and {given}; give those of one."
            )
        filesystem = found
        if info.type == fs.FileType.NotFound:
            raise ConfigError(f"dataset {name!r}: there is no file or folder {given}.")
        if info.type == fs.FileType.File:
            files.append(path)
            continue
        below = found.get_file_info(fs.FileSelector(path, recursive=True))
        inside = sorted(each.path for each in below if each.is_file and not _is_hidden(each.path, path))
        if not inside:
            raise ConfigError(f"dataset {name!r}: the folder {given} has no files in it.")
        files += inside
    return filesystem, files


def _local(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _is_hidden(path: str, folder: str) -> bool:
    return any(part.startswith((".", "_")) for part in path[len(folder) :].strip("/").split("/"))


def _format_of(name: str, path: str) -> str:
    stem, ending = os.path.splitext(path.lower())
    if ending in _COMPRESSIONS:
        ending = os.path.splitext(stem)[1]
    if ending not in _FORMATS:
        raise ConfigError(
            f"dataset {name!r}: what format {path} has cannot be told from its name; names end in one of "
            f"{', '.join(_FORMATS)}. Give others as pyarrow.dataset.dataset(path, format=...)."
        )
    return _FORMATS[ending]


def _parts_of(name: str, number: int, fragment: Any, schema: Any, condition: Any) -> list[_Part]:
    import pyarrow as pa

    try:
        if not hasattr(fragment, "row_groups"):
            return [(FilePart(number), fragment.count_rows(filter=condition))]
        _check_columns(name, fragment, schema)
        return list(_row_groups(number, fragment, condition))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(name, fragment.path, error) from error


def _row_groups(number: int, fragment: Any, condition: Any) -> Iterator[_Part]:
    group: list[int] = []
    rows = size = 0
    for each in fragment.row_groups:
        if group and size + each.total_byte_size > PART_BYTES:
            yield FilePart(number, tuple(group)), rows
            group, rows, size = [], 0, 0
        group.append(each.id)
        size += each.total_byte_size
        rows += (
            each.num_rows
            if condition is None
            else fragment.subset(row_group_ids=[each.id]).count_rows(filter=condition)
        )
    if group:
        yield FilePart(number, tuple(group)), rows


def _check_columns(name: str, fragment: Any, schema: Any) -> None:
    import pyarrow.dataset as ds

    there = {*fragment.physical_schema.names, *ds.get_partition_keys(fragment.partition_expression)}
    for column in schema.names:
        if column not in there:
            raise ConfigError(f"dataset {name!r}: {fragment.path} has no column {column!r}, which other files have.")


def _unreadable(name: str, path: str, error: BaseException) -> ConfigError:
    kind = with_article(type(error).__name__)
    line = str(error).split("\n", 1)[0]
    return ConfigError(f"dataset {name!r}: {path} cannot be read, {kind}: {line}")


def _index(known: list[Any], wanted: Any) -> int:
    """Where it is in the list; it is added where it is not."""
    for index, each in enumerate(known):
        if each == wanted:
            return index
    known.append(wanted)
    return len(known) - 1
