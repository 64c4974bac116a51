"""Finds the files of a dataset and counts the rows in each part of them. Driver side.

Formats with metadata, such as Parquet, are not read any further; rows of CSV and JSON lines are counted.
"""

from __future__ import annotations

import fnmatch
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raysgd.data.plan import WINDOW_ROWS, FilePart, Files, Source
from raysgd.data.reading.files import FileReadOptions
from raysgd.data.reading.text import COMPRESSIONS, TextKind
from raysgd.data.sources.column_types import common_schema, nulls_of_files
from raysgd.data.sources.text import NUM_READERS, SizedPart, scan_text_files, unreadable_error
from raysgd.errors import ConfigError

#: Consecutive row groups of a file are read together, up to about this size.
PART_BYTES = 32 * 2**20
#: A window has fewer than `WINDOW_ROWS` rows where it would take more memory than this.
WINDOW_BYTES = 64 * 2**20
_MIN_WINDOW_ROWS = 256

#: The class of `pyarrow.dataset` that reads files with this ending.
_FORMATS = {
    ".parquet": "ParquetFileFormat",
    ".pq": "ParquetFileFormat",
    ".arrow": "IpcFileFormat",
    ".ipc": "IpcFileFormat",
    ".feather": "IpcFileFormat",
    ".csv": "CsvFileFormat",
    ".json": "JsonFileFormat",
    ".jsonl": "JsonFileFormat",
    ".ndjson": "JsonFileFormat",
}
#: Those whose files raysgd reads itself.
_TEXT_KINDS: dict[str, TextKind] = {"CsvFileFormat": "csv", "JsonFileFormat": "lines"}
_WILDCARD = re.compile(r"[*?\[]")


def source_of_paths(name: str, given: Any) -> Source:
    """Return the source of the files at a path or URI, or at a list of them.

    A folder stands for all files below it, except names that begin with ``.`` or ``_``, and a pattern such as
    ``data/*.parquet`` for what it matches; ``**`` matches any number of folders. Below a single folder, or the folder before
    a single pattern, path parts of the form ``key=value`` are columns (Hive partitioning).

    Raises:
        ConfigError: No file was found, or the files cannot be read as one dataset.
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    paths = [os.fspath(path) for path in (given if isinstance(given, list) else [given])]
    filesystem, files, folder = _find(name, paths)
    formats = {path: _format_of(name, path) for path in files}
    if len(set(formats.values())) > 1:
        first = files[0]
        other = next(path for path in files if formats[path] != formats[first])
        raise ConfigError(
            f"dataset {name!r} has files of several formats, {first} and {other}; give files of one format."
        )
    if formats[files[0]] in _TEXT_KINDS:
        return _source_of_text(name, filesystem, files, folder, _TEXT_KINDS[formats[files[0]]])
    options = ds.FileSystemFactoryOptions(
        partition_base_dir=folder, partitioning=ds.HivePartitioning.discover() if folder else None
    )
    file_format = getattr(ds, formats[files[0]])()
    try:
        dataset = ds.FileSystemDatasetFactory(filesystem, files, file_format, options).finish()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable_error(name, files[0], error) from error
    return source_of_dataset(name, dataset, has_schema=False)


def _source_of_text(name: str, filesystem: Any, files: Sequence[str], folder: str | None, kind: TextKind) -> Source:
    text = scan_text_files(name, filesystem, files, folder, kind, PART_BYTES)
    return Source(
        "files",
        tuple(part.part for part in text.parts),
        tuple(part.num_rows for part in text.parts),
        Files(tuple(files), text.sizes, pickle.dumps(text.read_options)),
        window_rows=_window_rows(text.parts),
        nulls=text.nulls,
    )


def source_of_dataset(name: str, dataset: Any, *, has_schema: bool = True) -> Source:
    """Return the source of the files of a `pyarrow.dataset.Dataset`.

    Args:
        name: Its name for messages.
        dataset: The dataset.
        has_schema: Whether its schema is to be kept; else the types of a column are those that hold the values of all files.

    Raises:
        ConfigError: A file cannot be read, or its columns differ from those of the first file.
    """
    schema = dataset.schema
    condition = dataset._scan_options.get("filter")  # where dataset.filter(...) stores it; pyarrow has no public access
    unfiltered = dataset.replace_schema(schema)  # a copy
    unfiltered._scan_options = {}  # a filtered dataset does not list its fragments
    fragments = list(unfiltered.get_fragments())
    for fragment in fragments:
        if not hasattr(fragment, "path"):
            raise ConfigError(f"dataset {name!r} is a union of files and of tables in memory; give one or the other.")

    with ThreadPoolExecutor(min(NUM_READERS, max(1, len(fragments)))) as pool:
        sizes = tuple(pool.map(lambda fragment: _open_file(name, fragment), fragments))
        if not has_schema:
            schema = common_schema(name, schema, map(_path_and_schema, fragments))

        def inspect(number: int) -> list[SizedPart]:
            return _inspect_file(name, number, fragments[number], sizes[number], schema, condition)

        parts = [part for of_file in pool.map(inspect, range(len(fragments))) for part in of_file if part.num_rows]
    formats: list[tuple[Any, Any]] = []
    format_of = [_index(formats, (fragment.format, fragment.filesystem)) for fragment in fragments]
    partitions = [fragment.partition_expression for fragment in fragments]
    read_options = FileReadOptions(
        schema=schema,
        formats=tuple(formats),
        format_of=tuple(format_of) if len(formats) > 1 else (),
        partitions=tuple(partitions) if any(str(each) != "true" for each in partitions) else (),
        filter=condition,
    )
    return Source(
        "files",
        tuple(part.part for part in parts),
        tuple(part.num_rows for part in parts),
        Files(tuple(fragment.path for fragment in fragments), sizes, pickle.dumps(read_options)),
        window_rows=_window_rows(parts),
        nulls=nulls_of_files(name, fragments, schema, is_filtered=condition is not None),
    )


def _window_rows(parts: Sequence[SizedPart]) -> int:
    """Return the rows of a window: fewer if rows are large, since a worker holds all blocks of a window in memory."""
    per_row = max(1, sum(part.num_bytes for part in parts)) / max(1, sum(part.num_rows for part in parts))
    return max(_MIN_WINDOW_ROWS, min(WINDOW_ROWS, int(WINDOW_BYTES / per_row)))


def _find(name: str, paths: Sequence[str]) -> tuple[Any, list[str], str | None]:
    """Return the filesystem, the files on it, and the folder if a single one was given."""
    from pyarrow import fs

    filesystem: Any = None
    files: list[str] = []
    folder: str | None = None
    for given in paths:
        if not given:
            raise ConfigError(f"dataset {name!r} has an empty path; give a path or URI.")
        if given.startswith("file:") and re.search("[#?]", given):  # which end the path of a URI
            raise ConfigError(
                f"dataset {name!r}: in the URI {given}, # and ? end the path; write %23 and %3F, or give the path without file://."
            )
        try:
            found, path = fs.FileSystem.from_uri(given) if "://" in given else (fs.LocalFileSystem(), _local(given))
            path, inside = _files_at(name, given, found, path)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise unreadable_error(name, given, error) from error
        if filesystem is not None and found != filesystem:
            raise ConfigError(
                f"dataset {name!r} has paths on several storages, {paths[0]} and {given}; give paths on one storage."
            )
        filesystem = found
        files += inside
        folder = path if len(paths) == 1 and inside != [path] else None
    return filesystem, files, folder


def _files_at(name: str, given: str, filesystem: Any, path: str) -> tuple[str, list[str]]:
    """Return the file or folder at a path, or the folder before a pattern; and the files that are meant."""
    from pyarrow import fs

    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.NotFound and _WILDCARD.search(path):
        return _files_matching(name, given, filesystem, path)
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"dataset {name!r}: there is no file or folder {given}; check the path.")
    if info.type == fs.FileType.File:
        return path, [path]
    if info.type != fs.FileType.Directory:
        raise ConfigError(f"dataset {name!r}: {given} is neither a file nor a folder; give one of them.")
    inside = sorted(_files_below(name, filesystem, path))
    if not inside:
        raise ConfigError(
            f"dataset {name!r}: the folder {given} has no files in it, apart from names that begin with . or _; check the path."
        )
    return path, inside


def _files_below(name: str, filesystem: Any, folder: str) -> list[str]:
    from pyarrow import fs

    below = filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    shown = [each for each in below if not _is_hidden(each.path, folder)]
    _check_links(name, filesystem, folder, shown)
    if isinstance(filesystem, fs.LocalFileSystem):
        _check_targets(name, {folder, *(each.path for each in shown if not each.is_file)})
    return [each.path for each in shown if each.is_file]


def _check_targets(name: str, folders: Iterable[str]) -> None:
    """Check that links in these folders lead to something: pyarrow does not list the others.

    Raises:
        ConfigError: One leads to nothing.
    """
    for folder in sorted(folders):
        for entry in os.scandir(folder):
            if entry.is_symlink() and not entry.name.startswith((".", "_")) and not os.path.exists(entry.path):
                raise ConfigError(
                    f"dataset {name!r}: {entry.path} is a link to a file that does not exist; remove the link."
                )


def _check_links(name: str, filesystem: Any, folder: str, found: Sequence[Any]) -> None:
    """Check the links among what pyarrow found below a folder, which it follows.

    Raises:
        ConfigError: A link leads back to a folder above it.
    """
    from pyarrow import fs

    if not isinstance(filesystem, fs.LocalFileSystem):
        return
    for path in sorted({os.path.dirname(each.path) for each in found}):
        above = [path]
        while len(above[-1]) > len(folder):
            above.append(os.path.dirname(above[-1]))
        if len(set(map(os.path.realpath, above))) < len(above):
            raise ConfigError(
                f"dataset {name!r}: {path} is a link to a folder above it, so its files would come again; remove the link."
            )


def _files_matching(name: str, given: str, filesystem: Any, path: str) -> tuple[str, list[str]]:
    """Return the folder before the first wildcard of a pattern, and the files that match it or are in folders that do."""
    from pyarrow import fs

    parts = path.rstrip("/").split("/")
    first = next(index for index, part in enumerate(parts) if _WILDCARD.search(part))
    folder, pattern = "/".join(parts[:first]) or "/", parts[first:]
    is_deep = len(pattern) > 1 or pattern == ["**"]
    below = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=is_deep))
    matching = [each for each in below if _matches(each.path[len(folder) :].strip("/").split("/"), pattern)]
    _check_links(name, filesystem, folder, matching)
    files = {each.path for each in matching if each.is_file}
    for each in matching if pattern[-1] != "**" else ():  # that has matched all files by itself
        if not each.is_file:
            files.update(_files_below(name, filesystem, each.path))
    if not files:
        raise ConfigError(f"dataset {name!r}: no file matches {given}; check the pattern.")
    return folder, sorted(files)


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern. Wildcards do not match ``.`` or ``_`` at the begin."""
    if not path or not pattern:
        return list(pattern) in ([], ["**"]) and not path
    is_hidden = path[0].startswith((".", "_")) and not pattern[0].startswith((".", "_"))
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (not is_hidden and _matches(path[1:], pattern))
    return not is_hidden and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _local(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _is_hidden(path: str, folder: str) -> bool:
    return any(part.startswith((".", "_")) for part in path[len(folder) :].strip("/").split("/"))


def _format_of(name: str, path: str) -> str:
    stem, ending = os.path.splitext(path.lower())
    if ending in COMPRESSIONS:
        ending = os.path.splitext(stem)[1]
    if ending not in _FORMATS:
        raise ConfigError(
            f"dataset {name!r}: the name of {path} does not say its format; known endings are {', '.join(_FORMATS)}. Give "
            "other files as pyarrow.dataset.dataset(path, format=...)."
        )
    return _FORMATS[ending]


def _open_file(name: str, fragment: Any) -> int | None:
    """Read the metadata of a file; return its size in bytes, or None if its storage does not say."""
    import pyarrow as pa

    try:
        # The size is read first, so that workers notice a change that happens while the driver reads.
        size: int | None = fragment.filesystem.get_file_info(fragment.path).size
        fragment.physical_schema  # noqa: B018 - the fragment keeps it
    except (pa.ArrowException, OSError) as error:
        raise unreadable_error(name, fragment.path, error) from error
    return size


def _path_and_schema(fragment: Any) -> tuple[str, Any]:
    """Return a file's path, and the schema of its columns that are not in the path."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    in_path = ds.get_partition_keys(fragment.partition_expression)
    physical = fragment.physical_schema
    return fragment.path, physical if not in_path else pa.schema(
        [each for each in physical if each.name not in in_path]
    )


def _inspect_file(
    name: str, number: int, fragment: Any, size: int | None, schema: Any, condition: Any
) -> list[SizedPart]:
    """Return the parts of a file."""
    import pyarrow as pa

    try:
        _check_columns(name, fragment, schema)
        if not hasattr(fragment, "row_groups"):
            return [SizedPart(FilePart(number), _count_rows(fragment, schema, condition), size or 0)]
        return list(_row_groups(number, fragment, schema, condition))
    except (pa.ArrowException, OSError) as error:
        raise unreadable_error(name, fragment.path, error) from error


def _row_groups(number: int, fragment: Any, schema: Any, condition: Any) -> Iterator[SizedPart]:
    row_bytes = sum(_value_bytes(field.type) for field in schema)
    group: list[int] = []
    rows = size = 0
    for each in fragment.row_groups:
        decoded = max(each.total_byte_size, each.num_rows * row_bytes)  # encoded rows may take a hundredth of that
        if group and size + decoded > PART_BYTES:
            yield SizedPart(FilePart(number, tuple(group)), rows, size)
            group, rows, size = [], 0, 0
        group.append(each.id)
        size += decoded
        rows += (
            each.num_rows
            if condition is None
            else _count_rows(fragment.subset(row_group_ids=[each.id]), schema, condition)
        )
    if group:
        yield SizedPart(FilePart(number, tuple(group)), rows, size)


def _count_rows(fragment: Any, schema: Any, condition: Any) -> int:
    """Count the rows that pass the filter. The filter may use partition columns, which only the dataset's schema has.

    Text is converted to the types of the schema meanwhile, so that a value of another type is found before the run.
    """
    import pyarrow.dataset as ds

    if isinstance(fragment.format, (ds.CsvFileFormat, ds.JsonFileFormat)):
        return sum(batch.num_rows for batch in fragment.to_batches(schema=schema, filter=condition))
    if condition is None:
        return int(fragment.count_rows())
    return int(fragment.scanner(schema=schema, filter=condition).count_rows())


def _value_bytes(kind: Any) -> float:
    """Return the approximate size of a value of this Arrow type."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return float(kind.list_size * _value_bytes(kind.value_type))
    try:
        return float(kind.bit_width) / 8
    except ValueError:
        return 16.0


def _check_columns(name: str, fragment: Any, schema: Any) -> None:
    """Check that a file has the columns of the first file, of types that can be converted to theirs."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    physical = fragment.physical_schema
    in_path = ds.get_partition_keys(fragment.partition_expression)
    for field in schema:
        if field.name in in_path:
            continue
        if field.name not in physical.names:
            raise ConfigError(
                f"dataset {name!r}: {fragment.path} has no column {field.name!r}, which other files have; give files with "
                "equal columns."
            )
        kinds = [physical.field(field.name).type, field.type]
        has_no_own_type = any(pa.types.is_null(kind) or pa.types.is_dictionary(kind) for kind in kinds)
        is_other_kind = any(test(kinds[0]) != test(kinds[1]) for test in (pa.types.is_primitive, pa.types.is_boolean))
        if not has_no_own_type and is_other_kind:
            raise ConfigError(
                f"dataset {name!r}: column {field.name!r} has type {kinds[0]} in {fragment.path} and {kinds[1]} in other "
                "files; write it with one type."
            )


def _index(known: list[Any], wanted: Any) -> int:
    """Return the index of a value in the list, after appending it if it is missing."""
    if wanted not in known:
        known.append(wanted)
    return known.index(wanted)
