"""Shards, positions and batches as a training loop sees them, with two ranks that step together in one process."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from raysgd.data.batches.batches import Batches
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.order.position import check_agreement
from raysgd.data.sources import memory
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import AttemptEnded, CheckpointError, ConfigError, UsageError

Read = Callable[[WorkerDatasets], Batches[Any]]


def group(dataset: Any, world_size: int = 2, *, seed: int | None = 0, positions: Any = None) -> list[WorkerDatasets]:
    """Return the datasets of all ranks, as after loading a checkpoint at ``positions``."""
    plan = resolve_datasets(dataset, lambda value: value)
    positions = json.loads(json.dumps(positions))
    return [
        WorkerDatasets(plan, rank, world_size, seed, positions, fetch=lambda value: value) for rank in range(world_size)
    ]


def single_worker(dataset: Any, **given: Any) -> WorkerDatasets:
    return group(dataset, 1, **given)[0]


def numbers(num_rows: int = 10) -> dict[str, Any]:
    return {"x": np.arange(num_rows)}


def torch_batches(**options: Any) -> Read:
    return lambda context: context.get().get_split().to_torch(**options)


def values(batch: Any) -> list[int]:
    return [int(x) for x in batch["x"]]


def lockstep(contexts: list[WorkerDatasets], read: Read) -> Iterator[list[list[int]]]:
    """Yield the steps of one epoch as lists of each rank's rows; all ranks have equally many."""
    for batches in zip(*[read(context) for context in contexts], strict=True):
        check_agreement({rank: context.positions() for rank, context in enumerate(contexts)})
        yield [values(batch) for batch in batches]


def flat(parts: list[list[int]]) -> list[int]:
    return list(chain(*parts))


def at(context: WorkerDatasets, name: str = "dataset") -> tuple[int, int]:
    position = context.positions()[name]
    return position["epoch"], position["consumed"]


# -- rows of each rank --------------------------------------------------------------------------------------------


def test_each_rank_takes_its_slice_of_each_step_and_the_last_may_be_empty() -> None:
    steps = list(lockstep(group(numbers(10)), torch_batches(batch_size=4)))
    assert steps == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9], []]]


def test_drop_last_leaves_out_the_short_step() -> None:
    read = torch_batches(batch_size=4, drop_last=True)
    contexts = group(numbers(10))
    assert list(lockstep(contexts, read)) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert [at(context) for context in contexts] == [(1, 0), (1, 0)]
    assert len(read(contexts[0])) == 1 and len(torch_batches(batch_size=4)(contexts[0])) == 2


def test_fewer_rows_than_workers() -> None:
    assert list(lockstep(group(numbers(1), 3), torch_batches(batch_size=4))) == [[[0], [], []]]


def test_iter_rows_assigns_rows_one_by_one() -> None:
    first, second = (context.get().get_split() for context in group(numbers(5)))
    assert [row["x"] for row in first.iter_rows()] == [0, 2, 4]
    assert [row["x"] for row in second.iter_rows()] == [1, 3]
    assert (len(first), len(second), len(first.iter_rows())) == (3, 2, 3)
    assert (first.epoch, second.epoch) == (1, 1)


@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_shuffled_order_differs_by_epoch_and_not_by_number_of_workers(shuffle: Any) -> None:
    epochs = []
    for world_size in (1, 2, 4):
        contexts = group(numbers(20), world_size, seed=5)
        read = torch_batches(batch_size=8 // world_size, shuffle=shuffle)
        epochs.append([[flat(step) for step in lockstep(contexts, read)] for _ in range(3)])
    assert epochs[0] == epochs[1] == epochs[2]
    rows = [flat(epoch) for epoch in epochs[0]]
    assert all(sorted(epoch) == list(range(20)) for epoch in rows)
    assert len({tuple(epoch) for epoch in rows}) == 3
    (other_seed,) = islice(
        lockstep([single_worker(numbers(20), seed=6)], torch_batches(batch_size=20, shuffle=shuffle)), 1
    )
    assert other_seed[0] != rows[0]


def test_shard_of_another_rank_has_its_own_position() -> None:
    contexts = group(numbers(8))
    dataset = contexts[0].get()
    next(iter(dataset.get_split().to_torch(2)))
    assert [values(batch) for batch in dataset.get_shard(1).to_torch(2)] == [[2, 3], [6, 7]]
    assert at(contexts[0]) == (1, 0)  # its iterator was dropped
    assert dataset.get_shard(1).epoch == 1
    assert dataset.get_shard(0).epoch == dataset.get_split().epoch == 1
    with pytest.raises(ConfigError, match=r"get_shard\(2\) has no such rank: give one below 2"):
        dataset.get_shard(2)


def test_whole_dataset_is_read_on_every_rank_in_addition_to_its_shards() -> None:
    contexts = group(numbers(5))
    for rank, context in enumerate(contexts):
        whole = context.get().get_split(whole=True)
        assert [values(batch) for batch in whole.to_torch(2)] == [[0, 1], [2, 3], [4]]
        assert len(whole) == 5
        assert repr(whole) == "DatasetShard('dataset', whole, 5 of 5 rows)"
        assert at(contexts[rank]) == (0, 0), "the shards are elsewhere"
    assert list(lockstep(contexts, torch_batches(batch_size=2))) == [[[0, 1], [2, 3]], [[4], []]]
    assert [values(batch) for batch in contexts[0].get().get_split(whole=True).to_torch(5, shuffle="full")] != [
        [0, 1, 2, 3, 4]
    ]


def test_each_rank_resumes_where_it_was_in_a_whole_dataset() -> None:
    contexts = group(numbers(6))
    held = [iter(context.get().get_split(whole=True).to_torch(1)) for context in contexts]
    next(held[0])
    for _ in range(3):
        next(held[1])
    check_agreement({rank: context.positions() for rank, context in enumerate(contexts)})
    saved = [json.loads(json.dumps(context.own_positions())) for context in contexts]
    assert [own["dataset"]["consumed"] for own in saved] == [1, 3]

    resumed = group(numbers(6), 3)
    for context, own in zip(resumed, [*saved, saved[0]], strict=True):
        context.restore({}, own)
        assert context.own_positions() == own, "a rank that saves before it reads keeps its position"
    remaining = [flat([values(batch) for batch in c.get().get_split(whole=True).to_torch(1)]) for c in resumed]
    assert remaining == [[1, 2, 3, 4, 5], [3, 4, 5], [1, 2, 3, 4, 5]]
    resumed[0].restore({})
    assert resumed[0].own_positions() == {}
    with pytest.raises(CheckpointError, match="which has 9 rows now"):
        single_worker(numbers(9)).restore({}, saved[1])


def test_end_of_epochs_also_ends_loops_over_a_whole_dataset() -> None:
    context = single_worker(numbers(4))
    whole = context.get().get_split(whole=True)
    loop = iter(whole.to_torch(4))
    next(loop)
    context.end_epochs(only_finished=True)
    assert whole.epoch == 1


# -- positions ------------------------------------------------------------------------------------------------


def test_batch_is_consumed_when_it_is_handed_out() -> None:
    context = single_worker(numbers(10))
    assert context.positions() == {"dataset": {"epoch": 0, "consumed": 0}}
    seen = [at(context) for _ in context.get().get_split().to_torch(4)]
    assert seen == [(0, 4), (0, 8), (0, 10)]
    assert at(context) == (1, 0)


def test_each_iteration_is_the_next_epoch_whichever_reader_is_used() -> None:
    context = single_worker(numbers(4))
    loader = context.get().get_split().to_torch(2)
    assert [loader.epoch for _ in range(2) for _ in loader] == [0, 0, 1, 1]
    assert context.get().get_split().epoch == 2
    assert [context.get().get_split().epoch for _ in context.get().get_split().iter_batches(4)] == [2]


def test_break_ends_the_epoch() -> None:
    context = single_worker(numbers(10))
    loader = context.get().get_split().to_torch(4)
    for _ in loader:
        break
    gc.collect()
    assert at(context) == (1, 0)
    assert [values(batch)[0] for batch in loader] == [0, 4, 8]


def test_an_iterator_that_was_never_advanced_consumes_nothing() -> None:
    context = single_worker(numbers(4))
    iter(context.get().get_split().to_torch(2))
    gc.collect()
    assert at(context) == (0, 0)


def test_new_iteration_ends_the_one_in_progress() -> None:
    context = single_worker(numbers(10))
    loader = context.get().get_split().to_torch(4)
    first = iter(loader)
    next(first)
    second = iter(context.get().get_split().iter_rows())
    assert next(second)["x"] == 0
    assert at(context) == (1, 1)
    with pytest.raises(UsageError, match="this iteration over dataset 'dataset' ended because another one began"):
        next(first)
    assert at(context) == (1, 1) and next(second)["x"] == 1


def test_first_batch_consumes_nothing_and_is_the_first_of_the_epoch() -> None:
    context = single_worker(numbers(10), seed=1)
    shard = context.get().get_split()
    loader = shard.to_torch(4, shuffle="full")
    peeked = values(loader.first_batch())
    batches = iter(loader)
    assert values(next(batches)) == peeked
    next(batches)
    assert values(loader.first_batch()) == peeked
    assert at(context) == (0, 8)
    assert shard.first_batch()["x"].tolist() == [0]
    assert shard.first_batch(3, format="pandas").x.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="has no rows, so it has no first batch"):
        single_worker(numbers(0)).get().get_split().first_batch()


def test_dataset_without_rows_has_empty_epochs() -> None:
    context = single_worker(numbers(0))
    assert list(context.get().get_split().to_torch(4)) == []
    assert at(context) == (1, 0)


# -- resuming from a checkpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, "window", "full"])
def test_another_number_of_workers_resumes_at_the_next_row(shuffle: Any) -> None:
    def training(contexts: list[WorkerDatasets]) -> list[int]:
        """What is left of this epoch, and the next one."""
        read = torch_batches(batch_size=2, shuffle=shuffle)
        return [row for _ in range(2) for step in lockstep(contexts, read) for row in flat(step)]

    fault_free = training(group(numbers(14)))
    saved = checkpoint_after(numbers(14), torch_batches(batch_size=2, shuffle=shuffle), 2)
    assert training(group(numbers(14), 3, positions=saved)) == fault_free[8:]


def checkpoint_after(dataset: Any, read: Read, num_steps: int) -> dict[str, Any]:
    """Return the positions in a checkpoint that is saved in the loop body of step ``num_steps``."""
    contexts = group(dataset)
    for step, _ in enumerate(lockstep(contexts, read), 1):
        if step == num_steps:
            return contexts[0].positions()
    raise AssertionError("no such step")


def test_checkpoint_in_the_last_step_resumes_with_an_empty_remainder() -> None:
    read = torch_batches(batch_size=4)
    inside = checkpoint_after(numbers(10), read, 2)
    assert (inside["dataset"]["epoch"], inside["dataset"]["consumed"]) == (0, 10)
    contexts = group(numbers(10), positions=inside)
    assert list(lockstep(contexts, read)) == []
    assert len(list(lockstep(contexts, read))) == 2

    contexts = group(numbers(10))
    list(lockstep(contexts, read))
    after = contexts[0].positions()
    assert after == {"dataset": {"epoch": 1, "consumed": 0}}
    assert len(list(lockstep(group(numbers(10), positions=after), read))) == 2


@pytest.mark.parametrize("read", [torch_batches(batch_size=5), lambda context: context.get().get_split().iter_rows()])
def test_loop_ends_well_if_the_body_of_its_last_step_moves_the_position(read: Read) -> None:
    context = single_worker(numbers(10))
    loop = read(context)
    for step, _ in enumerate(loop, 1):
        if step == len(loop):
            next(iter(loop))  # as by a load of a checkpoint, or by an evaluation


def test_resumed_epoch_keeps_its_seed() -> None:
    read = torch_batches(batch_size=2, shuffle="full")
    fault_free = [flat(step) for step in lockstep(group(numbers(12), seed=1), read)]
    contexts = group(numbers(12), seed=1)
    iterators = [iter(read(context)) for context in contexts]
    first = [values(next(iterator)) for iterator in iterators]
    resumed = group(numbers(12), seed=2, positions=contexts[0].positions())
    remaining = [flat(step) for step in lockstep(resumed, read)]
    assert [flat(first), *remaining] == fault_free
    new_epoch = [flat(step) for step in lockstep(resumed, read)]
    other = group(numbers(12), seed=2)
    list(lockstep(other, read))
    assert new_epoch == [flat(step) for step in lockstep(other, read)]


def test_resuming_an_epoch_in_another_order_is_refused() -> None:
    saved = checkpoint_after(numbers(10), torch_batches(batch_size=1, shuffle="full"), 2)
    context = single_worker(numbers(10), positions=saved)
    with pytest.raises(
        ConfigError, match=r"epoch 0, 4 rows consumed\) whose order is that of shuffle='full', not of shuffle=False"
    ):
        next(iter(context.get().get_split().to_torch(1)))
    assert at(context) == (0, 4)


def test_resuming_an_epoch_of_another_dataset_is_refused() -> None:
    saved = checkpoint_after({"train": numbers(10)}, torch_batches(batch_size=1), 2)
    with pytest.raises(
        CheckpointError, match=r"dataset 'train' \(epoch 0, 4 rows consumed of 10\), which has 11 rows now"
    ):
        single_worker({"train": numbers(11)}, positions=saved)
    with pytest.raises(CheckpointError, match="is 3, which is not a position"):
        single_worker({"train": numbers(11)}).restore({"train": 3})
    with pytest.raises(CheckpointError, match="has 9 rows now"):
        single_worker({"train": numbers(9)}).restore(saved)
    single_worker({"train": numbers(10)}).restore(saved)
    single_worker({"validation": numbers(11)}, positions=saved)  # a name that is not given any more


def test_resuming_a_window_epoch_over_other_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = torch_batches(batch_size=1, shuffle="window")
    saved = checkpoint_after(numbers(10), read, 2)
    monkeypatch.setattr(memory, "BLOCK_BYTES", 16)
    with pytest.raises(ConfigError, match="shuffle='window' over other blocks of rows: some rows would come twice"):
        next(iter(read(single_worker(numbers(10), positions=saved))))
    plain = checkpoint_after(numbers(10), torch_batches(batch_size=1, shuffle="full"), 2)
    assert len(list(torch_batches(batch_size=1, shuffle="full")(single_worker(numbers(10), positions=plain)))) == 6


def test_loading_a_checkpoint_moves_loaders_made_before() -> None:
    saved = checkpoint_after(numbers(10), torch_batches(batch_size=2), 1)
    context = single_worker(numbers(10))
    loader = context.get().get_split().to_torch(2)
    under_way = iter(loader)
    next(under_way)
    context.restore(saved)
    with pytest.raises(UsageError, match="or a checkpoint was loaded"):
        next(under_way)
    assert [values(batch) for batch in loader] == [[4, 5], [6, 7], [8, 9]]
    two = single_worker({"a": numbers(10), "b": numbers(10)})
    list(two.get("a").get_split().to_torch(10))
    with pytest.raises(CheckpointError, match="dataset 'b'"):
        two.restore({"a": saved["dataset"], "b": saved["dataset"] | {"num_rows": 11}})
    assert at(two, "a") == (1, 0)


def test_each_dataset_has_its_own_position() -> None:
    context = single_worker({"train": numbers(4), "validation": numbers(3)})
    for _ in context.get("train").get_split().to_torch(2):
        list(context.get("validation").get_split().to_torch(2))
    assert (at(context, "train"), at(context, "validation")) == ((1, 0), (2, 0))


def test_batch_that_cannot_be_read_is_not_consumed() -> None:
    rows = [[1], [2], [3, 3], [4]]
    context = single_worker({"train": rows})
    with pytest.raises(ConfigError, match="rows of dataset 'train' cannot be collated"):
        for _ in context.get().get_split().to_torch(2):
            pass
    assert at(context, "train") == (0, 2)
    assert list(context.get().get_split().iter_rows()) == [[3, 3], [4]]


def test_exception_of_the_read_context_ends_the_loop_and_consumes_nothing() -> None:
    calls: list[int] = []

    def read_context() -> AbstractContextManager[None]:
        calls.append(1)
        if len(calls) == 3:
            raise AttemptEnded("the group grows")
        return nullcontext()

    plan = resolve_datasets(numbers(10), lambda value: value)
    context = WorkerDatasets(plan, 0, 1, 0, fetch=lambda value: value, read_context=read_context)
    with pytest.raises(AttemptEnded):
        list(context.get().get_split().to_torch(2))
    assert at(context) == (0, 4)
    assert len(list(context.get().get_split().iter_rows())) == 6
    assert len(calls) == 3 + 6


@settings(max_examples=25)
@given(
    st.integers(1, 30),
    st.sampled_from([False, "window", "full"]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9), st.integers(0, 3)), max_size=6),
)
def test_every_row_comes_once_through_crashes_and_resizes(num_rows: int, shuffle: Any, attempts: list[Any]) -> None:
    saved: Any = None
    trained: Counter[tuple[int, int]] = Counter()
    for world_size, batch, kept, lost in [*attempts, (2, 3, num_rows, 0)]:
        contexts = group(numbers(num_rows), world_size, positions=saved)
        for step, (epoch, rows) in enumerate(islice(training(contexts, batch, shuffle), kept + lost), 1):
            if step <= kept:
                trained.update((epoch, row) for row in rows)
                saved = contexts[-1].positions()
    full_epochs, consumed = saved["dataset"]["epoch"], saved["dataset"]["consumed"]
    counts = Counter(epoch for epoch, _ in trained.elements())
    assert set(trained.values()) == {1}
    assert [counts[epoch] for epoch in range(full_epochs)] == [num_rows] * full_epochs
    assert counts[full_epochs] == consumed


def training(contexts: list[WorkerDatasets], batch: int, shuffle: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield for each step of every epoch the epoch and the rows of all ranks together."""
    while True:
        epoch = contexts[0].get().get_split().epoch
        for step in lockstep(contexts, torch_batches(batch_size=batch, shuffle=shuffle)):
            yield epoch, flat(step)


# -- names -------------------------------------------------------------------------------------------------------


def test_dataset_is_found_by_its_name() -> None:
    context = single_worker({"train": numbers(4), "validation": numbers(3)})
    assert context.get("validation").num_rows == 3
    assert list(context.all()) == ["train", "validation"]
    with pytest.raises(
        ConfigError, match=r"no dataset 'trian' \(did you mean 'train'\?\): the run has 'train', 'validation'"
    ):
        context.get("trian")
    with pytest.raises(
        ConfigError, match=r"get_dataset\(\) needs the name of a dataset: the run has 'train', 'validation'"
    ):
        context.get()
    with pytest.raises(ConfigError, match="no dataset 'train': the run's dataset has no name"):
        single_worker(numbers()).get("train")
    assert single_worker({"train": numbers(4)}).get().name == "train"


def test_folds_are_returned_in_the_structure_given() -> None:
    context = single_worker(((numbers(4), numbers(2)), (numbers(3), numbers(3))))
    pairs = context.all()
    assert [(train.num_rows, validation.num_rows) for train, validation in pairs] == [(4, 2), (3, 3)]
    list(pairs[1][0].get_split().to_torch(2))
    assert [at(context, name)[0] for name in ("0/train", "1/train", "1/validation")] == [0, 1, 0]
    assert [dataset.num_rows for dataset in single_worker((numbers(4), numbers(2))).all()] == [4, 2]
    with pytest.raises(ConfigError, match=r"get_datasets\(\) returns them in the order of the tuple"):
        context.get("train")


def test_schema_has_columns_and_types() -> None:
    schema = pa.schema({"x": pa.int64(), "y": pa.float32()})
    assert single_worker(numbers(2) | {"y": np.zeros(2, np.float32)}).get().schema == schema
    assert single_worker(pa.table({"x": [1], "y": pa.array([1.0], pa.float32())})).get().schema == schema
    assert single_worker([1, 2]).get().schema is None


# -- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "pandas", "pyarrow"])
def test_batches_of_every_format_have_equal_rows(kind: Any) -> None:
    arrays = {"x": np.arange(5), "y": np.arange(10.0).reshape(5, 2), "s": np.array(list("abcde"), object)}
    table = pa.table({"x": arrays["x"], "y": pa.FixedSizeListArray.from_arrays(np.arange(10.0), 2), "s": arrays["s"]})
    for dataset in (arrays, table):
        for shuffle in (False, "full"):
            batches = single_worker(dataset).get().get_split().iter_batches(2, format=kind, shuffle=shuffle)
            frames = [batch if kind == "pandas" else table_frame(batch) for batch in batches]
            frame = pd.concat(frames)
            assert [len(batch) for batch in frames] == [2, 2, 1]
            assert sorted(frame.x) == list(range(5)) and list(frame.columns) == ["x", "y", "s"]
            assert all(
                list(y) == [2.0 * x, 2.0 * x + 1] and s == "abcde"[x] for x, y, s in frame.itertuples(index=False)
            )


def table_frame(batch: Any) -> pd.DataFrame:
    if isinstance(batch, pa.Table):
        batch = {name: batch.column(name).combine_chunks() for name in batch.column_names}
        batch = {
            name: column.to_numpy_ndarray() if hasattr(column, "to_numpy_ndarray") else column.to_pylist()
            for name, column in batch.items()
        }
    return pd.DataFrame({name: list(column) for name, column in batch.items()})


def test_unshuffled_arrays_are_views_and_tensors_are_writeable() -> None:
    array, frame = np.arange(8.0), pd.DataFrame({"x": np.arange(8.0)})
    for dataset, x in (({"x": array}, array), (pa.table({"x": array}), array), (frame, frame.x.to_numpy())):
        shard = single_worker(dataset).get().get_split()
        (batch,) = shard.iter_batches(8)
        assert np.shares_memory(batch["x"], x) and not batch["x"].flags.writeable
        (tensors,) = shard.to_torch(8)
        tensors["x"].zero_()
        (collated,) = shard.to_torch(8, collate_fn=lambda arrays: torch.from_numpy(arrays["x"]))
        collated.zero_()
        assert x.tolist() == list(range(8))


def test_columns_and_dtypes_arguments() -> None:
    shard = (
        single_worker({"x": np.arange(4), "y": np.ones((4, 2), np.float32), "z": np.zeros(4, bool)}).get().get_split()
    )
    (batch,) = shard.to_torch(4, columns=["y", "x"], dtypes={"x": torch.float16}, device="cpu")
    assert list(batch) == ["y", "x"]
    assert (batch["y"].dtype, batch["x"].dtype, batch["y"].shape) == (torch.float32, torch.float16, (4, 2))
    (batch,) = shard.to_torch(4, dtypes=torch.float64)
    assert {tensor.dtype for tensor in batch.values()} == {torch.float64}
    assert [list(batch) for batch in shard.iter_batches(4, columns=["z"])] == [["z"]]


def test_collate_fn_makes_the_batch() -> None:
    shard = single_worker({"x": np.arange(4), "s": np.array(["a", "bc", "d", ""])}).get().get_split()
    collate = lambda arrays: (torch.from_numpy(arrays["x"]), [len(s) for s in arrays["s"]])  # noqa: E731
    assert [(x.tolist(), lengths) for x, lengths in shard.to_torch(3, collate_fn=collate)] == [
        ([0, 1, 2], [1, 2, 1]),
        ([3], [0]),
    ]


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([1.0, 2.0]), "pair": (1, "a")}


ITEMS = Items()


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "empty"),
    [
        ({"x": np.ones((1, 2, 3), np.float16)}, None, {"x": torch.empty(0, 2, 3, dtype=torch.float16)}),
        (pa.table({"x": [[1, 2]]}), None, {"x": torch.empty(0, 2, dtype=torch.int64)}),
        (ITEMS, None, {"x": torch.empty(0, 2), "pair": [torch.empty(0, dtype=torch.int64), ()]}),
        (ITEMS, lambda items: items, []),
        (ITEMS, lambda items: {"kept": 3, "t": torch.stack([i["x"] for i in items], 1)}, {"kept": 3, "t": torch.empty(2, 0)}),
        (ITEMS, lambda items: torch.cat([i["x"] for i in items]), torch.empty(0)),
    ],
    ids=["arrays", "lists", "items", "list of items", "rows on another axis", "rows laid end to end"],
)  # fmt: skip
def test_empty_batch_has_the_structure_of_the_others(dataset: Any, collate_fn: Any, empty: Any) -> None:
    first, second = (context.get().get_split().to_torch(1, collate_fn=collate_fn) for context in group(dataset))
    assert len(list(first)) == 1
    (batch,) = second
    torch.testing.assert_close(batch, empty)
    torch.testing.assert_close(second.first_batch(), empty)


def test_batch_that_cannot_be_emptied_is_refused() -> None:
    _, second = group(ITEMS)
    with pytest.raises(ConfigError, match=r"no rows of dataset 'dataset' in the last step, .*the set that collate_fn"):
        list(second.get().get_split().to_torch(1, collate_fn=lambda items: {1, 2}))
    assert list(second.get().get_split().to_torch(1, collate_fn=lambda items: {1, 2}, drop_last=True)) == []


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (numbers(), {"columns": ["xx"]}, r"no column 'xx' \(did you mean 'x'\?\); it has 'x'"),
        (numbers(), {"columns": "x"}, r"give a list: columns=\['x'\]"),
        (numbers(), {"dtypes": {"y": torch.float32}}, "no column 'y'"),
        (numbers(), {"dtypes": "float32"}, "is not a torch dtype"),
        (numbers(), {"dtypes": torch.float32, "collate_fn": list}, "set its types there"),
        (numbers(), {"batch_size": 0}, "batch_size=0 is too small"),
        (numbers(), {"shuffle": True}, "shuffle=True is not known; give 'full', 'window' or False"),
        ([1, 2], {"columns": ["x"]}, r"to_torch\(columns=\.\.\.\).*have no columns"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(dataset: Any, options: dict[str, Any], message: str) -> None:
    shard = single_worker(dataset).get().get_split()
    with pytest.raises(ConfigError, match=message):
        shard.to_torch(**{"batch_size": 2, **options})


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"format='nump' is not known.*did you mean 'numpy'"):
        single_worker(numbers()).get().get_split().iter_batches(2, format="nump")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"map-style dataset, whose rows have no columns: read it with to_torch"):
        single_worker([1]).get().get_split().iter_batches(2)
    with pytest.raises(ConfigError, match=r"iter_batches\(format='pandas', collate_fn=...\) exclude each other"):
        single_worker([1]).get().get_split().iter_batches(2, format="pandas", collate_fn=list)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_what_collate_fn_returns(prefetch: int) -> None:
    items = [{"a": 1}, [2], "three"]
    shard = single_worker(GivenItems(items)).get().get_split()
    batches = list(shard.iter_batches(2, collate_fn=tuple, prefetch=prefetch))
    assert batches == [({"a": 1}, [2]), ("three",)]
    assert batches[0][0] is items[0]
    sums = (
        single_worker(numbers())
        .get()
        .get_split()
        .iter_batches(
            4, collate_fn=lambda arrays: {name: float(each.sum()) for name, each in arrays.items()}, prefetch=prefetch
        )
    )
    assert sum(each["x"] for each in sums) == float(numbers()["x"].sum())


class GivenItems:
    """A map-style dataset."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]
