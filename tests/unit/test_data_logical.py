"""Each logical worker reads the same rows in the same steps, in any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.order import stream_order
from raysgd.data.order.position import check_agreement
from raysgd.data.plan import UNNAMED, DatasetPlan, Source
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError, UsageError
from raysgd.session.logical import workers_of_rank
from support.streams import LazyRows, hosted

#: What each logical worker reads, step by step.
Read = dict[int, list[list[int]]]


def processes(dataset: Any, num: int, num_logical: int, positions: Any = None) -> list[WorkerDatasets]:
    plan = dataset if isinstance(dataset, DatasetPlan) else resolve_datasets(dataset, lambda value: value)
    ranges = [workers_of_rank(rank, num, num_logical) for rank in range(num)]
    return [
        WorkerDatasets(
            plan,
            own.start,
            num_logical,
            1,
            json.loads(json.dumps(positions)),
            fetch=lambda value: value,
            reader=rank,
            num_logical=len(own),
        )
        for rank, own in enumerate(ranges)
    ]


def read_steps(group: list[WorkerDatasets], num_logical: int, limit: int = 1000, **options: Any) -> tuple[Read, Any]:
    """Return what the logical workers read in up to ``limit`` steps of the epoch, and the position afterwards."""
    found: Read = {number: [] for number in range(num_logical)}
    batches = [context.get().get_split().to_torch(**options) for context in group]
    positions = [context.positions() for context in group]
    for number, steps in enumerate(zip(*[each.sliced_steps() for each in batches], strict=True)):
        if number == limit:
            break  # ends the epoch
        for rank, step in enumerate(steps):
            own = workers_of_rank(rank, len(group), num_logical)
            for logical, rows in zip(own, step.slices, strict=True):
                found[logical].append([int(x) for x in step.read(rows)["x"]])
            step.finish()
        assert steps[0].num_rows == sum(len(read[-1]) for read in found.values())
        assert not steps[0].is_even or len({len(read[-1]) for read in found.values()}) == 1
        positions = [context.positions() for context in group]
    check_agreement(dict(enumerate(positions)))
    return found, positions[0]


@settings(max_examples=60)
@given(
    st.integers(1, 60),
    st.integers(1, 8),
    st.sampled_from([False, "window", "full"]),
    st.sampled_from([{"batch_size": 1}, {"batch_size": 3}, {"global_batch_size": 9}, {"global_batch_size": 13}]),
    st.booleans(),
    st.data(),
)
def test_rows_of_a_logical_worker_do_not_depend_on_the_processes(
    num_rows: int, num_logical: int, shuffle: Any, sizes: dict[str, int], drop_last: bool, data: st.DataObject
) -> None:
    dataset = {"x": np.arange(num_rows)}
    options = {**sizes, "shuffle": shuffle, "drop_last": drop_last}
    alone, end = read_steps(processes(dataset, 1, num_logical), num_logical, **options)
    counts = st.integers(1, num_logical)
    shared, end_of_shared = read_steps(processes(dataset, data.draw(counts), num_logical), num_logical, **options)
    assert (alone, end) == (shared, end_of_shared)

    done = data.draw(st.integers(0, max(0, len(alone[0]) - 1)))
    first, position = read_steps(processes(dataset, data.draw(counts), num_logical), num_logical, done, **options)
    remainder, _ = read_steps(processes(dataset, data.draw(counts), num_logical, position), num_logical, **options)
    if done:
        assert {number: first[number] + remainder[number] for number in first} == alone


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number in range(5):
        x = np.arange(number * 40, number * 40 + 40)
        pq.write_table(pa.table({"x": x}), folder / f"{number}.parquet", row_group_size=9)
    return folder


@pytest.mark.parametrize("shuffle", [False, "window", "full"])
@pytest.mark.parametrize("sizes", [{"batch_size": 3}, {"global_batch_size": 13}])
def test_shuffled_files_likewise(files: Path, shuffle: Any, sizes: dict[str, int]) -> None:
    found = [read_steps(processes(files, num, 6), 6, shuffle=shuffle, **sizes)[0] for num in (1, 2, 4, 6)]
    assert all(each == found[0] for each in found)
    assert sorted(x for read in found[0].values() for rows in read for x in rows) == list(range(200))


@pytest.mark.parametrize("shuffle", [False, "window"])
def test_lazy_datasets_likewise(shuffle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_order, "MIN_STRETCH_BYTES", 16)  # many groups of a few rows of 8 bytes
    monkeypatch.setattr(stream_order, "MAX_STRETCH_BYTES", 40)
    found = []
    for num in (1, 2, 3, 6):
        with hosted(LazyRows(lambda _: [5] * 19)) as stream:
            plan = DatasetPlan({UNNAMED: Source("stream", (stream,), ())})
            group = processes(plan, num, 6)
            found.append(read_steps(group, 6, shuffle=shuffle, batch_size=3)[0])
            for context in group:
                context.close()
    assert all(each == found[0] for each in found)
    assert sorted(x for read in found[0].values() for rows in read for x in rows) == list(range(95))


def test_loops_that_would_mix_the_rows_of_logical_workers_are_refused() -> None:
    shard = processes({"x": np.arange(8)}, 2, 4)[1].get().get_split()
    assert repr(shard) == "DatasetShard('dataset', 2 logical workers from 2 of 4, 4 of 8 rows)"
    for loop in (shard.to_torch(2), shard.iter_batches(2), shard.iter_rows()):
        with pytest.raises(UsageError, match="logical_steps"):
            next(iter(loop))
    with pytest.raises(ConfigError, match="at least as many rows"):
        shard.to_torch(global_batch_size=3)
    with pytest.raises(ConfigError, match="own shard"):
        processes({"x": np.arange(8)}, 2, 4)[1].get().get_shard(0)


def test_all_rows_can_be_read_on_every_worker() -> None:
    for context in processes({"x": np.arange(8)}, 2, 4):
        whole = context.get().get_split(whole=True)
        assert [int(x) for batch in whole.to_torch(3) for x in batch["x"]] == list(range(8))


def test_a_step_that_is_not_finished_is_not_consumed() -> None:
    (context,) = processes({"x": np.arange(8)}, 1, 2)
    steps = context.get().get_split().to_torch(2).sliced_steps()
    next(steps)
    assert context.get().position.consumed == 0
