"""Files that cannot be read as one dataset are refused before the run, by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError

TABLE = pa.table({"x": range(7), "s": [str(i) * i for i in range(7)]})


def as_parquet(path: Path) -> Path:
    pq.write_table(TABLE, path / "a.parquet", row_group_size=3)
    return path / "a.parquet"


def as_csv(path: Path) -> Path:
    pa.csv.write_csv(TABLE, path / "a.csv")
    return path / "a.csv"


def no_path(path: Path) -> Any:
    return path / "nowhere"


def empty_folder(path: Path) -> Any:
    (path / "empty").mkdir()
    return path / "empty"


def unknown_ending(path: Path) -> Any:
    (path / "a.txt").touch()
    return path / "a.txt"


def several_formats(path: Path) -> Any:
    return [as_parquet(path), as_csv(path)]


def corrupt(path: Path) -> Any:
    as_parquet(path)
    (path / "b.parquet").write_bytes(b"PAR1 this is none PAR1")
    return path


def lacks_a_column(path: Path) -> Any:
    as_parquet(path)
    pq.write_table(TABLE.drop_columns("s"), path / "b.parquet")
    return path


def has_one_more_column(path: Path) -> Any:
    pq.write_table(TABLE.drop_columns("s"), path / "a.parquet")
    pq.write_table(TABLE, path / "b.parquet")
    return path


def has_one_more_column_in_feather(path: Path) -> Any:
    pa.feather.write_feather(TABLE.drop_columns("s"), path / "a.feather")
    pa.feather.write_feather(TABLE, path / "b.feather")
    return path


def leads_to_itself(path: Path) -> Any:
    as_parquet(path)
    (path / "more").mkdir()
    (path / "more" / "all").symlink_to(path)
    return path


def matches_itself(path: Path) -> Any:
    return f"{leads_to_itself(path)}/**"


def broken_link(path: Path) -> Any:
    as_parquet(path)
    (path / "b.parquet").symlink_to(path / "gone.parquet")
    return path


def late_fraction_in_a_pyarrow_dataset(path: Path) -> Any:
    (path / "a.csv").write_text("x\n" + "1\n" * 600_000 + "0.5\n")
    return ds.dataset(path / "a.csv", format="csv")


def uri_with_a_fragment(path: Path) -> Any:
    as_parquet(path).rename(path / "a#1.parquet")
    return f"file://{path}/a#1.parquet"


def lacks_one_in_a_csv(path: Path) -> Any:
    (path / "a.csv").write_text("a,b\n1,2\n")
    (path / "b.csv").write_text("a,c\n1,2\n")
    return path


def another_type(path: Path) -> Any:
    pq.write_table(pa.table({"x": [1]}), path / "a.parquet")
    pq.write_table(pa.table({"x": ["r"]}), path / "b.parquet")
    return path


def partly_in_memory(path: Path) -> Any:
    return ds.dataset([ds.dataset(as_parquet(path)), ds.dataset(TABLE)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_path, r"no file or folder .*nowhere"),
        (empty_folder, r"the folder .*empty has no files"),
        (unknown_ending, r"a\.txt does not say its format.*\.parquet"),
        (several_formats, r"several formats, .*a\.parquet and .*a\.csv"),
        (corrupt, r"b\.parquet cannot be read"),
        (lacks_a_column, r"b\.parquet has no column 's'"),
        (has_one_more_column, r"b\.parquet has a column 's', which others do not have"),
        (has_one_more_column_in_feather, r"b\.feather has a column 's', which others do not have"),
        (leads_to_itself, r"/more/all is a link to a folder above it"),
        (matches_itself, r"/more/all is a link to a folder above it"),
        (broken_link, r"b\.parquet is a link to a file that does not exist"),
        (late_fraction_in_a_pyarrow_dataset, r"a\.csv cannot be read because .*Row #600002.* invalid value '0\.5'"),
        (uri_with_a_fragment, r"a#1\.parquet, # and \? end the path; write %23"),
        (lacks_one_in_a_csv, r"b\.csv has no column 'b'"),
        (another_type, r"column 'x' has type string in .*b\.parquet and int64 in other files"),
        (partly_in_memory, r"union of files and of tables"),
        (lambda path: "", r"empty path"),
        (lambda path: f"{path}/*.parquet", r"no file matches .*/\*\.parquet; check the pattern"),
        (lambda path: f"{path}/none/*/x.csv", r"no file matches"),
        (lambda path: "/dev/null", r"/dev/null is neither a file nor a folder"),
        (lambda path: "nosuch://bucket/key", r"nosuch://bucket/key cannot be read"),
    ],
)
def test_unreadable_files_are_refused_before_the_run(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_datasets(make(tmp_path), lambda block: block)
