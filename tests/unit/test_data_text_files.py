"""Rows of CSV and JSON files are those that Python's csv and json read, wherever pieces of a file begin and end."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import math
import pickle
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.sources import files
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError


def table_of(dataset: Any, part_bytes: int = 32 * 2**20, batch_size: int = 7) -> pa.Table:
    """Return all rows as a worker reads them, in parts of about ``part_bytes``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PART_BYTES", part_bytes)
        plan = pickle.loads(pickle.dumps(resolve_datasets(dataset, lambda block: block)))
    context = WorkerDatasets(plan, 0, 1, 0, fetch=lambda ref: ref)
    batches = list(context.get().get_split().iter_batches(batch_size, format="pyarrow"))
    context.close()
    return pa.concat_tables(batches) if batches else pa.table({})


def rows_of(dataset: Any, part_bytes: int = 32 * 2**20) -> list[Any]:
    return table_of(dataset, part_bytes).to_pylist()


def lines(rows: Iterable[Any], end: str = "\n") -> str:
    return "".join(json.dumps(row) + end for row in rows)


def complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in which each key of any row is, with None where a row has no value."""
    keys = {key: None for row in rows for key in row}
    return [{**keys, **row} for row in rows]


def same(one: Any, other: Any) -> bool:
    """Whether values are equal, also NaN, and numbers too if one is an integer and the other a float."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


# -- JSON ----------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COLUMN_VALUES: list[st.SearchStrategy[Any]] = [
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**64 - 1),
    st.floats() | st.integers(-(2**53), 2**53),
    TEXTS | st.sampled_from(["2024-01-01", "2024-01-01T00:00:00Z", "12:30", "NaN", ""]),
    st.lists(st.integers(-9, 9) | st.none() | st.floats(allow_nan=False, width=16), max_size=3),
    st.lists(st.lists(TEXTS, max_size=2), max_size=2),
    st.none(),
]
JSON_ROWS = st.lists(st.sampled_from(COLUMN_VALUES), min_size=1, max_size=4).flatmap(
    lambda columns: st.lists(
        st.fixed_dictionaries({}, optional={f"c{i}": values | st.none() for i, values in enumerate(columns)}),
        min_size=1,
    )
)


@settings(max_examples=150, deadline=None)
@given(
    rows=JSON_ROWS,
    part_bytes=st.integers(1, 200),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]),
    last=st.booleans(),
)
def test_json_lines_are_read_as_json_reads_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], part_bytes: int, end: str, last: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.jsonl"
    text = lines(rows, end)
    path.write_bytes((text if last else text.rstrip()).encode())
    expected = complete([json.loads(line) for line in text.split("\n") if line.strip()])
    if expected[0]:
        assert same(rows_of(path, part_bytes), expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(JSON_ROWS, min_size=1, max_size=3), st.sampled_from(["array", "indented", "gzip"]))
def test_json_documents_and_compressed_files_are_read_as_json_reads_them(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[Any]], form: str
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    rows = [{**row, "always": index} for index, row in enumerate(parts[0])]
    if form == "gzip":
        (folder / "a.json.gz").write_bytes(gzip.compress(lines(rows).encode()))
    elif form == "array":
        (folder / "a.json").write_text(json.dumps(rows))
    else:
        for index, row in enumerate(rows):
            (folder / f"{index:04}.json").write_text(json.dumps(row, indent=2))
    assert same(rows_of(folder), complete([json.loads(json.dumps(row)) for row in rows]))


# -- CSV -----------------------------------------------------------------------------------------------------------

CELLS = [
    st.integers(-(2**63), 2**63 - 1).map(str) | st.just(""),
    st.floats().map(str) | st.integers(-(2**53), 2**53).map(str) | st.just(""),
    st.sampled_from(["true", "false", "True", "FALSE", ""]),
    TEXTS,
    st.sampled_from(["NA", "null", "", "1", "0x1f", "007", "2024-01-01", "12:30", " 1", "1e5", "nan", "-0"]),
    st.text("\",\n\r' a", max_size=6),
]
CSV_ROWS = st.lists(st.sampled_from(CELLS), min_size=2, max_size=4).flatmap(
    lambda columns: st.lists(st.tuples(*columns), min_size=1)
)
MISSING = {"", "#N/A", "#N/A N/A", "#NA", "N/A", "NA", "NULL", "n/a", "null"}


def as_cell(value: Any, text: str) -> bool:
    """Whether a value that was read is the text of a cell, or the number that it says."""
    if value is None:
        return text in MISSING
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int):
        return str(value) == text.strip() or (value, text) == (0, "-0")
    return same(value, float(text)) if isinstance(value, float) else bool(value == text)


@settings(max_examples=250, deadline=None)
@given(
    rows=CSV_ROWS,
    part_bytes=st.integers(1, 100),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    last=st.booleans(),
)
def test_csv_is_read_as_csv_reads_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], part_bytes: int, end: str, quoting: Any, last: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.csv"
    text = io.StringIO(newline="")
    csv.writer(text, quoting=quoting, lineterminator=end).writerows([[f"c{i}" for i in range(len(rows[0]))], *rows])
    path.write_bytes((text.getvalue() if last else text.getvalue().removesuffix(end)).encode())
    expected = list(csv.DictReader(io.StringIO(text.getvalue(), newline="")))
    assume(all(None not in row and None not in row.values() for row in expected))  # csv writes "\r" without quotes
    table = table_of(path, part_bytes)
    found = table.to_pylist()
    assert len(found) == len(expected)
    assert all(as_cell(row[key], wanted[key]) for row, wanted in zip(found, expected, strict=True) for key in wanted)
    assert table.schema == table_of(path).schema, "the types do not depend on where pieces begin"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text('",\n a', min_size=1, max_size=8), min_size=1, max_size=6), st.integers(1, 30))
def test_quotes_within_cells_do_not_move_the_records(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], part_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "quotes.csv"
    text = "c\n" + "\n".join(texts)
    path.write_text(text)
    expected = [cells for cells in csv.reader(io.StringIO(text, newline="")) if cells][1:]
    if all(len(cells) == 1 for cells in expected):
        assert [str(row["c"] or "") for row in rows_of(path, part_bytes)] == [cell for (cell,) in expected]
    else:
        with pytest.raises(ConfigError, match=r"quotes.csv, line \d+ has \d cells and the header has 1"):
            rows_of(path, part_bytes)


# -- what a file may look like -------------------------------------------------------------------------------------

GZIPPED = gzip.compress(b'{"a": 1}\n{"a": 2.5}')
FILES: dict[str, tuple[dict[str, str | bytes], list[Any]]] = {
    "no newline at the end": ({"a.jsonl": '{"a": 1}', "b.jsonl": '{"a": 2}'}, [{"a": 1}, {"a": 2}]),
    "dates are text": ({"a.jsonl": '{"a": "2024-01-01"}\n'}, [{"a": "2024-01-01"}]),
    "dates of CSV are text": ({"a.csv": "a,b\n2024-01-01,12:30\n"}, [{"a": "2024-01-01", "b": "12:30"}]),
    "a key that comes twice": ({"a.jsonl": '{"a": 1, "a": 2}\n'}, [{"a": 2}]),
    "unsigned integers": ({"a.jsonl": '{"a": 1}\n{"a": 18446744073709551615}\n'}, [{"a": 1}, {"a": 2**64 - 1}]),
    "unsigned integers of CSV": ({"a.csv": "a\n1\n18446744073709551615\n"}, [{"a": 1}, {"a": 2**64 - 1}]),
    "digits beyond 64 bits": ({"a.csv": "a\n1\n18446744073709551616\n"}, [{"a": "1"}, {"a": "18446744073709551616"}]),
    "digits beyond floats": (
        {"a.csv": "a\n9007199254740993\n", "b.csv": "a\n0.5\n"},
        [{"a": "9007199254740993"}, {"a": "0.5"}],
    ),
    "codes with leading zeros": (
        {"a.csv": "a,b\n007,0x1f\n10,1\n"},
        [{"a": "007", "b": "0x1f"}, {"a": "10", "b": "1"}],
    ),
    "booleans and numbers": ({"a.csv": "a\ntrue\n", "b.csv": "a\n1\n"}, [{"a": "true"}, {"a": "1"}]),
    "words among numbers": ({"a.csv": "a\n1\n", "b.csv": "a\nx\n"}, [{"a": "1"}, {"a": "x"}]),
    "cells without a value": (
        {"a.csv": "a,b,c\n1,,NA\n,,NA\n"},
        [{"a": 1, "b": "", "c": "NA"}, {"a": None, "b": "", "c": "NA"}],
    ),
    "a byte-order mark": (
        {"a.csv": b'\xef\xbb\xbf"a",b\r\n1,2\r\n', "b.csv": "b,a\n3,4"},
        [{"a": 1, "b": 2}, {"a": 4, "b": 3}],
    ),
    "a byte-order mark in JSON": ({"a.jsonl": b'\xef\xbb\xbf{"a": 1}'}, [{"a": 1}]),
    "empty files": ({"a.csv": "", "b.csv": "a\n", "c.csv": "a\n1\n"}, [{"a": 1}]),
    "empty files of JSON": ({"a.jsonl": "", "b.jsonl": "\n\n", "c.jsonl": '{"a": 1}\n'}, [{"a": 1}]),
    "an array": ({"a.json": '[{"a": 1},\n {"b": []}]\n'}, [{"a": 1, "b": None}, {"a": None, "b": []}]),
    "an object on several lines": ({"a.json": '{\n "a": [1,\n 2]\n}\n'}, [{"a": [1, 2]}]),
    "nulls before values in a list": ({"a.jsonl": '{"a": [null, 1]}\n'}, [{"a": [None, 1]}]),
    "compressed": (
        {"a.jsonl.gz": GZIPPED, "b.JSONL.BZ2": bz2.compress(b'{"a": 3}')},
        [{"a": 3.0}, {"a": 1.0}, {"a": 2.5}],
    ),
    "partitions": (
        {"m=01/k=a%20b/a.csv": "x\n1\n", "m=2/k=c/a.csv": "x\n2\n"},
        [{"x": 1, "m": 1, "k": "a b"}, {"x": 2, "m": 2, "k": "c"}],
    ),
    "odd names": (
        {"a b%20#?=:é\n.jsonl": '{"a": 1}\n', "_SUCCESS": "", ".b.jsonl": "x", "c" * 240 + ".jsonl": '{"a": 2}\n'},
        [{"a": 1}, {"a": 2}],
    ),
}


def write(folder: Path, contents: dict[str, str | bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("part_bytes", [1, 1000])
@pytest.mark.parametrize("name", FILES)
def test_rows_are_those_that_csv_and_json_read(name: str, part_bytes: int, tmp_path: Path) -> None:
    contents, expected = FILES[name]
    found = rows_of(write(tmp_path, contents), part_bytes)
    key = next(iter(expected[0]))
    assert sorted(found, key=lambda row: str(row[key])) == sorted(expected, key=lambda row: str(row[key]))


REFUSED: dict[str, tuple[dict[str, str | bytes], str]] = {
    "types of a file": (
        {"a.jsonl": '{"a": 1}\n\n{"a": "x"}\n'},
        r"column 'a' has the integer 1 in .*a\.jsonl, line 1 and text in .*a\.jsonl, line 3, which no type holds",
    ),
    "types of two files": (
        {"a.jsonl": '{"a": null}\n{"a": true}\n', "b.jsonl": '{"a": 0.5}\n'},
        r"column 'a' has a boolean in .*a\.jsonl, line 2 and a floating-point number in .*b\.jsonl, line 1",
    ),
    "types within objects": (
        {"a.jsonl": '{"a": {"b": [1]}}\n', "b.jsonl": '{"a": {"b": [{"c": 1}]}}\n'},
        r"column 'a\.b\[\]' has the integer 1 in .*a\.jsonl, line 1 and an object in .*b\.jsonl, line 1",
    ),
    "integers that floats round": (
        {"a.jsonl": '{"a": 0.5}\n', "b.jsonl": '{"a": 1}\n{"a": -9007199254740993}\n'},
        r"a floating-point number in .*a\.jsonl, line 1 and the integer -9007199254740993 in .*b\.jsonl, line 2",
    ),
    "integers of no type": (
        {"a.jsonl": '{"a": 1}\n{"a": 18446744073709551616}\n'},
        r"column 'a' has the integer 18446744073709551616 in .*a\.jsonl, line 2, which no number of 64 bits holds: write",
    ),
    "signs": (
        {"a.jsonl": '{"a": -1}\n{"a": 18446744073709551615}\n'},
        r"the integer -1 in .*line 1 and the integer 1844",
    ),
    "no JSON": ({"a.jsonl": '{"a": 1}\n{"a": 1,}\n'}, r"a\.jsonl cannot be read because .*line 2, column [89]"),
    "a line that is cut": ({"a.jsonl": '{"a": 1}\n{"a": "x'}, r"a\.jsonl cannot be read because .*line 2, column 7"),
    "no objects": ({"a.jsonl": '{"a": 1}\n[1]\n'}, r"a\.jsonl, line 2 has a list and not an object: give a JSON"),
    "an array of numbers": ({"a.json": "[1, 2]"}, r"a\.json, line 1 has an int and not an object"),
    "a surrogate": ({"a.jsonl": '{"a": "x"}\n{"a": "\\ud800"}\n'}, r"a\.jsonl, line 2 has half of a surrogate pair"),
    "another encoding": ({"a.jsonl": b'{"a": "x"}\n{"a": "\xff"}\n'}, r"a\.jsonl, line 2 is not UTF-8 text"),
    "another encoding of CSV": ({"a.csv": b"a\nx\n\xff\n"}, r"a\.csv, line 3 is not UTF-8 text"),
    "a row that is too long": (
        {"a.csv": 'a,b\n"1\n",2\n1,2,3\n'},
        r"a\.csv, line 4 has 3 cells and the header has 2: quote",
    ),
    "a quote that is not closed": (
        {"a.csv": 'a,b\n1,2\n"x,2\ny,3\n'},
        r"a\.csv, line 3 has 1 cells and the header has 2",
    ),
    "a header with a name twice": ({"a.csv": "a,b,a\n1,2,3\n"}, r"a\.csv has 2 columns named 'a'; rename all but one"),
    "a column too few": (
        {"a.csv": "a,b\n1,2\n", "b.csv": "a\n1\n"},
        r"b\.csv has no column 'b', which other files have",
    ),
    "a column too many": (
        {"a.csv": "a\n1\n", "b.csv": "a,b\n1,2\n"},
        r"b\.csv has a column 'b', which other files do not have",
    ),
    "nothing": (
        {"a.csv": "", "b.csv": "\n"},
        r"a\.csv is empty, as are the other files; give files with rows or a header",
    ),
}


@pytest.mark.parametrize("part_bytes", [1, 1000])
@pytest.mark.parametrize("name", REFUSED)
def test_text_files_that_are_no_table_are_refused_before_the_run(name: str, part_bytes: int, tmp_path: Path) -> None:
    contents, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        rows_of(write(tmp_path, contents), part_bytes)


def test_large_text_files_are_read_in_parts_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": index, "text": f"row {index}", "late": None if index < 900 else 0.5} for index in range(1000)]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    monkeypatch.setattr(files, "PART_BYTES", 4000)
    (source,) = resolve_datasets(tmp_path, lambda block: block).sources.values()
    size = (tmp_path / "a.jsonl").stat().st_size
    spans = [part.span for part in source.blocks]
    assert len(spans) >= size // 5000 and spans[0][0] == 0 and spans[-1][1] == size
    assert all(one[1] == other[0] and one[1] - one[0] <= 8000 for one, other in pairwise(spans))
    assert source.num_rows == 1000 and source.nulls == {"late": 900}


def test_gaps_of_numbers_are_counted_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,x\n,y\nNA,z\n")
    plan = resolve_datasets({"d": tmp_path}, lambda block: block)
    shard = WorkerDatasets(plan, 0, 1, 0, fetch=lambda ref: ref).get().get_split()
    with pytest.raises(ConfigError, match="column 'a' of dataset 'd' has 2 nulls among 3 values of int64"):
        shard.to_torch(1)
