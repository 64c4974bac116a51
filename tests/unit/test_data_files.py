"""Datasets of files: which rows they have, which worker reads which parts, and how unreadable files are reported."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.plan import DatasetPlan
from raysgd.data.reading import block_cache
from raysgd.data.reading import files as file_blocks
from raysgd.data.sources import files
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError, DataError


def contexts(dataset: Any, world_size: int = 1, *, positions: Any = None) -> list[WorkerDatasets]:
    """Return the datasets of all workers, from a pickled plan; nothing is stored."""

    def put(block: Any) -> Any:
        raise AssertionError("rows of files do not travel")

    plan: DatasetPlan = pickle.loads(pickle.dumps(resolve_datasets(dataset, put)))
    return [WorkerDatasets(plan, rank, world_size, 0, positions, fetch=lambda ref: ref) for rank in range(world_size)]


def rows(dataset: Any) -> list[Any]:
    (context,) = contexts(dataset)
    return list(context.get().get_split().iter_rows())


def write(folder: Path, num_files: int = 4, rows_each: int = 100, row_group: int = 25) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(num_files):
        x = np.arange(number * rows_each, (number + 1) * rows_each)
        pq.write_table(pa.table({"x": x, "y": x * 0.5}), folder / f"{number:03}.parquet", row_group_size=row_group)
    return folder


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each row group a block."""
    monkeypatch.setattr(files, "PART_BYTES", 1)


TABLE = pa.table({"x": np.arange(7), "s": [str(i) * i for i in range(7)]})
EXPECTED = [{"x": i, "s": str(i) * i} for i in range(7)]


def as_parquet(path: Path) -> Path:
    pq.write_table(TABLE, path / "a.parquet", row_group_size=3)
    return path / "a.parquet"


def as_ipc(path: Path) -> Path:
    with pa.OSFile(str(path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)
    return path / "a.arrow"


def as_feather(path: Path) -> Path:
    pa.feather.write_feather(TABLE, path / "a.feather", compression="lz4")
    return path / "a.feather"


def as_csv(path: Path) -> Path:
    pa.csv.write_csv(TABLE.set_column(1, "s", [[f"-{i}" for i in range(7)]]), path / "a.csv")
    return path / "a.csv"


def as_json(path: Path) -> Path:
    TABLE.to_pandas().to_json(path / "a.jsonl", orient="records", lines=True)
    return path / "a.jsonl"


def as_json_gz(path: Path) -> Path:
    TABLE.to_pandas().to_json(path / "a.jsonl.gz", orient="records", lines=True)
    return path / "a.jsonl.gz"


@pytest.mark.parametrize("make", [as_parquet, as_ipc, as_feather, as_csv, as_json, as_json_gz])
def test_files_of_each_format_are_read(make: Callable[[Path], Path], tmp_path: Path) -> None:
    expected = [{**row, "s": f"-{row['x']}"} for row in EXPECTED] if make is as_csv else EXPECTED
    path = make(tmp_path)
    for given_ in (
        path,
        str(path),
        path.as_uri(),
        [path],
        ds.dataset(path, format=getattr(ds, files._format_of("", str(path)))()),
    ):
        found = [{"x": int(row["x"]), "s": str(row["s"])} for row in rows(given_)]
        assert [row["x"] for row in found] == [row["x"] for row in expected]
        if make is not as_csv:
            assert found == expected


def test_folder_means_all_files_below_it_except_hidden_ones(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "a" / "more", 1)
    (tmp_path / "a" / "_SUCCESS").touch()
    (tmp_path / "a" / ".crc").mkdir()
    (tmp_path / "a" / ".crc" / "x.parquet").write_text("not one")
    assert len(rows(tmp_path / "a")) == 500
    assert [row["x"] for row in rows(sorted((tmp_path / "a").glob("*.parquet"))[1:3])] == list(range(100, 300))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.parquet", ["a.parquet", "b.parquet"]),
        ("?.parquet", ["a.parquet", "b.parquet"]),
        ("[bc].parquet", ["b.parquet"]),
        ("deep", ["deep/a.parquet", "deep/deeper/c.parquet"]),
        ("d*", ["deep/a.parquet", "deep/deeper/c.parquet"]),
        ("*/a.parquet", ["deep/a.parquet"]),
        ("**/a.parquet", ["a.parquet", "deep/a.parquet"]),
        ("**/*.parquet", ["a.parquet", "b.parquet", "deep/a.parquet", "deep/deeper/c.parquet"]),
        ("d*/**", ["deep/a.parquet", "deep/deeper/c.parquet"]),
        ("_*/*.parquet", ["_old/a.parquet"]),
    ],
)
def test_pattern_means_the_files_that_match_it(pattern: str, names: list[str], tmp_path: Path) -> None:
    for number, name in enumerate(["a", "b", "deep/a", "deep/deeper/c", "_old/a", ".hidden/a", "deep/.part"]):
        (tmp_path / f"{name}.parquet").parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [number]}), tmp_path / f"{name}.parquet")
    for given_ in (f"{tmp_path}/{pattern}", *([] if {*"?["} & {*pattern} else [f"file://{tmp_path}/{pattern}"])):
        (source,) = resolve_datasets(given_, lambda block: block).sources.values()
        assert source.files is not None
        assert [str(Path(path).relative_to(tmp_path)) for path in source.files.paths] == names


def test_file_whose_name_looks_like_a_pattern_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "odd[1].parquet")
    assert rows(tmp_path / "odd[1].parquet") == [{"x": 1}]


def test_links_are_followed(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    as_parquet(tmp_path)
    (given / "b.parquet").symlink_to(tmp_path / "a.parquet")
    (given / "folder").symlink_to(write(tmp_path / "x", num_files=1, rows_each=3), target_is_directory=True)
    assert rows(given / "*.parquet") == EXPECTED
    assert [row["x"] for row in rows(given / "folder")] == [0, 1, 2]


def test_uri_has_escapes(tmp_path: Path) -> None:
    path = as_parquet(tmp_path).rename(tmp_path / "a#1 100%.parquet")
    assert rows(path.as_uri()) == rows(path) == EXPECTED


def test_patterns_in_a_list_and_partitions_below_a_pattern(tmp_path: Path) -> None:
    for year in (2024, 2025, 2026):
        write(tmp_path / f"year={year}", 1, 10)
    assert len(rows([f"{tmp_path}/year=2024/*.parquet", f"{tmp_path}/year=2025/*"])) == 20
    found = rows(f"{tmp_path}/year=202[56]/*.parquet")
    assert Counter(int(row["year"]) for row in found) == {2025: 10, 2026: 10}


def test_hive_partitioned_folders_become_a_column(tmp_path: Path) -> None:
    for year in (2024, 2025):
        write(tmp_path / f"year={year}", 1, 10)
    found = rows(tmp_path)
    assert Counter(int(row["year"]) for row in found) == {2024: 10, 2025: 10}


def test_filter_on_a_partition_column(tmp_path: Path) -> None:
    for year in (2024, 2025):
        write(tmp_path / f"year={year}", 1, 10)
    dataset = ds.dataset(tmp_path, partitioning="hive").filter(ds.field("year") == 2025)
    assert [int(row["year"]) for row in rows(dataset)] == [2025] * 10


def test_folders_above_the_given_one_are_not_columns(tmp_path: Path) -> None:
    (tmp_path / "run=5").mkdir()
    (context,) = contexts(write(tmp_path / "run=5" / "train", 1))
    assert context.get().schema.names == ["x", "y"]


def test_filter_of_a_pyarrow_dataset_is_applied_when_files_are_read(tmp_path: Path, small_parts: None) -> None:
    dataset = ds.dataset(write(tmp_path / "a")).filter((ds.field("x") >= 90) & (ds.field("y") < 105))
    (context,) = contexts(dataset)
    assert context.get().num_rows == 120
    assert [int(row["x"]) for row in context.get().get_split().iter_rows()] == list(range(90, 210))


def test_pyarrow_dataset_in_memory_is_read_as_a_table() -> None:
    plan = resolve_datasets(ds.dataset(TABLE), lambda block: block)
    assert plan.sources["dataset"].kind == "arrow" and plan.sources["dataset"].num_rows == 7


def test_files_on_a_filesystem_that_is_not_local(tmp_path: Path) -> None:
    write(tmp_path / "a", 2)
    below = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    assert len(rows(ds.dataset("a", filesystem=below, format="parquet"))) == 200


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("shuffle", [False, "window", "full"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_row_comes_once_per_epoch_for_any_number_of_workers(tmp_path: Path, shuffle: Any, world_size: int) -> None:
    group = contexts(write(tmp_path / "a"), world_size)
    splits = [context.get().get_split() for context in group]
    orders = []
    for _ in range(2):
        batches = [split.to_torch(batch_size=30, shuffle=shuffle) for split in splits]
        steps = list(zip(*batches, strict=True))
        x = torch.cat([batch["x"] for batch in chain(*steps)])
        y = torch.cat([batch["y"] for batch in chain(*steps)])
        assert sorted(x.tolist()) == list(range(400)) and torch.equal(y, x * 0.5)
        orders.append(x.tolist())
    assert (orders[0] == orders[1]) == (shuffle is False)


@pytest.mark.usefixtures("small_parts")
def test_single_worker_reads_unshuffled_files_in_order(tmp_path: Path) -> None:
    (context,) = contexts(write(tmp_path / "a"))
    x = np.concatenate([batch["x"] for batch in context.get().get_split().iter_batches(33)])
    assert x.tolist() == list(range(400))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("shuffle", [False, "window", "full"])
def test_global_batches_are_the_same_for_any_number_of_workers(tmp_path: Path, shuffle: Any) -> None:
    def sequence(world_size: int) -> list[list[int]]:
        splits = [context.get().get_split() for context in contexts(tmp_path / "a", world_size)]
        read = [split.to_torch(global_batch_size=48, shuffle=shuffle) for split in splits]
        return [list(chain(*(batch["x"].tolist() for batch in step))) for step in zip(*read, strict=True)]

    write(tmp_path / "a")
    first = sequence(1)
    assert [len(batch) for batch in first] == [48] * 8 + [16]
    assert sequence(2) == sequence(3) == sequence(5) == first


@pytest.mark.usefixtures("small_parts")
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([False, "window", "full"]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=5),
)
def test_another_number_of_workers_resumes_at_exactly_the_same_row(
    tmp_path_factory: pytest.TempPathFactory, shuffle: Any, attempts: list[tuple[int, int, int]]
) -> None:
    folder = write(tmp_path_factory.getbasetemp() / "shared", 2)
    positions: Any = None
    seen: list[int] = []
    for world_size, batch_size, num_steps in [*attempts, (2, 50, 10)]:
        group = contexts(folder, world_size, positions=positions)
        if group[0].get().position.epoch:
            break
        read = [context.get().get_split().to_torch(batch_size, shuffle=shuffle) for context in group]
        for _, batches in zip(range(num_steps), zip(*read, strict=True), strict=False):
            seen += chain(*(batch["x"].tolist() for batch in batches))
            positions = group[0].positions()
    assert sorted(seen) == list(range(200))


def loads_of(group: list[WorkerDatasets], monkeypatch: pytest.MonkeyPatch) -> list[Counter[int]]:
    """Return counters, one per worker, of how often it reads each block."""
    counts: list[Counter[int]] = []
    for context in group:
        count: Counter[int] = Counter()
        blocks = context.get()._reader._files  # type: ignore[union-attr]
        load = blocks.load

        def counted(number: int, columns: Any, load: Any = load, count: Any = count) -> Any:
            count[number] += 1
            return load(number, columns)

        monkeypatch.setattr(blocks, "load", counted)
        counts.append(count)
    return counts


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("shuffle", [False, "window"])
def test_each_block_is_read_once_by_the_worker_that_needs_it(
    tmp_path: Path, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = contexts(write(tmp_path / "a"), 2)
    counts = loads_of(group, monkeypatch)
    read = [context.get().get_split().to_torch(20, shuffle=shuffle) for context in group]
    for _ in zip(*read, strict=True):
        pass
    assert [sorted(count.values()) for count in counts] == [[1] * 8, [1] * 8]
    assert not set(counts[0]) & set(counts[1])
    for _ in zip(*read, strict=True):  # all blocks fit into memory
        pass
    assert shuffle or sum(map(Counter.total, counts)) == 16


@pytest.mark.usefixtures("small_parts")
def test_blocks_beyond_the_memory_limit_are_released_and_read_once_per_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "MAX_HELD_BYTES", 3 * 25 * 16)
    (context,) = contexts(write(tmp_path / "a"))
    (count,) = loads_of([context], monkeypatch)
    shard = context.get().get_split()
    held = []
    reader = context.get()._reader.select(["x", "y"])  # type: ignore[union-attr]
    for batch in shard.to_torch(5):
        held.append(len(reader._blocks.held))
        del batch
    assert max(held) <= 5
    assert set(count.values()) == {1} and len(count) == 16


def test_only_requested_columns_are_read(tmp_path: Path) -> None:
    (context,) = contexts(write(tmp_path / "a"))
    dataset = context.get()
    batch = next(iter(dataset.get_split().to_torch(10, columns=["y"])))
    assert list(batch) == ["y"]
    reader = dataset._reader.select(["y"])  # type: ignore[union-attr]
    assert reader._blocks.get(0).column_names == ["y"]
    assert dataset.schema.names == ["x", "y"]


def test_small_row_groups_are_read_together(tmp_path: Path) -> None:
    write(tmp_path / "a", 2, 100, row_group=1)
    source = resolve_datasets(tmp_path / "a", lambda block: block).sources["dataset"]
    assert source.block_rows == (100, 100)


def test_row_groups_that_decode_to_much_memory_are_read_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.zeros(4_000_000, np.int64)}), path, row_group_size=1_000_000)
    assert path.stat().st_size < 100_000
    source = resolve_datasets(path, lambda block: block).sources["dataset"]
    assert source.block_rows == (4_000_000,)  # 32 MB
    pq.write_table(pa.table({"x": np.zeros(8_000_000, np.int64)}), path, row_group_size=1_000_000)
    assert resolve_datasets(path, lambda block: block).sources["dataset"].block_rows == (4_000_000, 4_000_000)


def test_window_of_large_rows_has_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_datasets(write(tmp_path / "a"), lambda block: block).sources["dataset"]
    assert source.window_rows == 65_536
    monkeypatch.setattr(files, "WINDOW_BYTES", 16 * 1000)
    source = resolve_datasets(tmp_path / "a", lambda block: block).sources["dataset"]
    assert 256 <= source.window_rows <= 1000


def test_held_blocks_stay_within_the_limit_in_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1)
    monkeypatch.setattr(files, "WINDOW_BYTES", 1)
    monkeypatch.setattr(block_cache, "MAX_HELD_BYTES", 8 * 25 * 16)
    group = contexts(write(tmp_path / "a", 10), 2)
    batches = [context.get().get_split().to_torch(5, shuffle="window") for context in group]
    readers = [context.get()._reader.select(["x", "y"]) for context in group]  # type: ignore[union-attr]
    held = []
    for _ in range(4):
        for _ in zip(*batches, strict=True):
            held += [len(reader._blocks.held) for reader in readers]
    assert max(held) <= 8 + 256 // 25 + 2  # a window has at least 256 rows


def test_empty_shard_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        pq.write_table(pa.table({"x": np.arange(5)}), tmp_path / f"{number}.parquet")
    group = contexts(tmp_path, 2)
    counts = loads_of(group, monkeypatch)
    for options in ("to_torch", "iter_batches"):
        read = [getattr(context.get().get_split(), options)(4) for context in group]
        sizes = [[len(batch["x"]) for batch in batches] for batches in zip(*read, strict=True)]
        assert sizes == [[4, 4], [4, 4], [4, 0]]
    assert set(counts[1]) == {2, 3}


def test_first_batch_does_not_wait_for_many_small_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(3)}), tmp_path / "0.parquet")
    for number in range(1, 1000):
        (tmp_path / f"{number}.parquet").hardlink_to(tmp_path / "0.parquet")
    (context,) = contexts(tmp_path)
    batches = iter(context.get().get_split().iter_batches(3))
    next(batches)
    blocks = context.get()._reader.select(["x"])._blocks  # type: ignore[union-attr]
    assert blocks.num_loading <= 8


def test_files_without_rows(tmp_path: Path) -> None:
    empty = TABLE.slice(0, 0)
    for number, table in enumerate([empty, TABLE, empty]):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    assert len(rows(tmp_path)) == 7
    assert rows(tmp_path / "0.parquet") == []
    (context,) = contexts(tmp_path / "0.parquet")
    assert list(context.get().get_split().to_torch(3)) == []


def test_fewer_rows_than_workers(tmp_path: Path) -> None:
    pq.write_table(TABLE.slice(0, 2), tmp_path / "a.parquet")
    group = contexts(tmp_path / "a.parquet", 4)
    steps = list(zip(*(context.get().get_split().to_torch(1, columns=["x"]) for context in group), strict=True))
    assert [[batch["x"].tolist() for batch in step] for step in steps] == [[[0], [1], [], []]]


# -- columns -----------------------------------------------------------------------------------------------------------

COLUMNS = {
    "decimal": pa.array([Decimal("1.5"), Decimal("2.25")]),
    "timestamp": pa.array([pd.Timestamp("2026-01-01"), pd.Timestamp("2026-01-02")]),
    "dictionary": pa.array(["a", "b"]).dictionary_encode(),
    "numbers by dictionary": pa.array([7, 8]).dictionary_encode(),
    "fixed": pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0, 3.0, 4.0]), 2),
    "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8.0).reshape(2, 2, 2)),
    "ragged": pa.array([[1], [2, 3]]),
    "text": pa.array(["x", "yz"]),
    "nulls": pa.array([1, None]),
    "binary": pa.array([b"x", b"yz"]),
    "bool": pa.array([True, False]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_files_equal_those_of_tables(name: str, tmp_path: Path) -> None:
    table = pa.table({"c": COLUMNS[name]})
    pq.write_table(table, tmp_path / "a.parquet")

    def outcomes(dataset: Any) -> list[str]:
        plan = resolve_datasets(dataset, lambda block: block)
        found = []
        for options in ("to_torch", "iter_batches"):
            context = WorkerDatasets(plan, 0, 1, 0, fetch=lambda ref: ref)
            try:
                found.append(str([batch["c"] for batch in getattr(context.get().get_split(), options)(2)]))
            except ConfigError as error:
                found.append(str(error))
        return found

    assert outcomes(tmp_path / "a.parquet") == outcomes(table)


# -- files that change -------------------------------------------------------------------------------------------------


def vanish(path: Path) -> None:
    path.unlink()


def shrink(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 90), path, row_group_size=100)


def rewrite(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, "x", pa.array([7] * table.num_rows)), path, row_group_size=100)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)


def rename(path: Path) -> None:
    pq.write_table(pq.read_table(path).rename_columns(["q", "y"]), path, row_group_size=100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (vanish, "cannot be read"),
        (shrink, "has changed"),
        (rewrite, r"had \d+ bytes and now has \d+"),
        (damage, "read"),
        (rename, "its column 'x' is gone"),
    ],
)
def test_file_that_changes_during_the_run_is_named(change: Any, message: str, tmp_path: Path) -> None:
    (context,) = contexts(write(tmp_path / "a", 2, 100, row_group=100))
    change(tmp_path / "a" / "001.parquet")
    x: list[int] = []
    batches = context.get().get_split().to_torch(50)
    with pytest.raises(DataError, match=rf"001\.parquet.*{message}"):
        x.extend(chain.from_iterable(batch["x"].tolist() for batch in batches))
    assert x == list(range(100))
    assert context.get().position.consumed == 100


def test_file_that_changes_between_two_parts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1)  # each row group is a block
    source = resolve_datasets(write(tmp_path / "a", 1, 200, row_group=100), lambda block: block).sources["dataset"]
    blocks = file_blocks.FileBlocks("dataset", source)
    blocks.load(0, ["x"])
    rewrite(next((tmp_path / "a").iterdir()))
    with pytest.raises(DataError, match="has changed since the run began"):
        blocks.load(1, ["x"])


def test_unknown_column_of_files_is_refused(tmp_path: Path) -> None:
    (context,) = contexts(write(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"no column 'z'; it has 'x', 'y'"):
        context.get().get_split().to_torch(2, columns=["x", "z"])


def test_reading_threads_end_with_the_session(tmp_path: Path) -> None:
    import threading

    (context,) = contexts(write(tmp_path / "a"))
    batches = iter(context.get().get_split().to_torch(2))
    next(batches)
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("raysgd-data")]
    assert readers
    context.close()
    for thread in readers:
        thread.join(20)
        assert not thread.is_alive()


def test_plan_of_many_files_is_small(tmp_path: Path) -> None:
    source = resolve_datasets(write(tmp_path / "a", 20), lambda block: block)
    assert len(pickle.dumps(source)) < 20 * 200 + 4000
    assert file_blocks.FileReadOptions is not None
