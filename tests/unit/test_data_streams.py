"""Lazy datasets: every row exactly once, although their number is unknown and each execution cuts other blocks."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.data.dataset import WorkerDatasets
from raysgd.data.order import stream_order
from raysgd.data.order.epoch_order import Shuffle
from raysgd.data.order.position import check_agreement
from raysgd.data.order.rank_assignment import RankAssignment
from raysgd.data.order.stream_order import StreamOrder
from raysgd.data.plan import UNNAMED, DatasetPlan, Source
from raysgd.data.shard import DatasetShard
from raysgd.data.streams import host as stream_host
from raysgd.data.streams.stream import InlineStream, ReaderState, Stream, StreamLostError, execute, summarize_error
from raysgd.errors import CheckpointError, ConfigError, DataError
from support.streams import LazyRows, hosted

shuffles = st.sampled_from([False, "window"])
counts = st.lists(st.integers(0, 12), max_size=12)


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stretches of a few rows of 8 bytes, so that a test has many groups."""
    monkeypatch.setattr(stream_order, "MIN_STRETCH_BYTES", 16)
    monkeypatch.setattr(stream_order, "MAX_STRETCH_BYTES", 40)


def contexts(
    stream: Stream, world_size: int, positions: dict[str, Any] | None = None, *, attempt: int = 0, seed: int = 0
) -> list[WorkerDatasets]:
    plan = DatasetPlan({UNNAMED: Source("stream", (stream,), ())})
    return [
        WorkerDatasets(plan, rank, world_size, seed, positions, fetch=_same, attempt=attempt)
        for rank in range(world_size)
    ]


#: Blocks of four groups of four: the slower rank's, the faster rank's, the next one, and one that a rank no longer needs but
#: has not yet reported, if the thread that sends its requests is late.
MOST_HELD = 16


def _same(value: Any) -> Any:
    return value


def _never() -> bool:
    return False


def inline(dataset: LazyRows) -> InlineStream:
    return InlineStream(lambda: execute(dataset), lambda ref: ref[0])


def rows_of(num_rows: int, per_block: int = 5) -> LazyRows:
    return LazyRows(lambda _: [min(per_block, num_rows - start) for start in range(0, num_rows, per_block)])


def epoch_of(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def lockstep(group: Sequence[WorkerDatasets], make: Callable[[DatasetShard], Any]) -> Iterator[list[list[int]]]:
    """Yield the batches of all ranks for each step of one epoch."""
    loops = [iter(make(context.get().get_split())) for context in group]
    try:
        yield from ([batch["x"].tolist() for batch in step] for step in zip(*loops, strict=True))
    finally:
        for loop in loops:
            loop.close()


# -- the order ------------------------------------------------------------------------------------------------------


def order_of(num_rows: int, stretch: int, lanes: int, shuffle: Shuffle, seed: int = 1, epoch: int = 0) -> StreamOrder:
    order = StreamOrder(seed=seed, epoch=epoch, shuffle=shuffle, lanes=lanes, stretch_rows=stretch)
    order.set_known_rows(num_rows, is_all=True)
    return order


@given(st.integers(0, 90), st.integers(1, 9), st.integers(1, 5), shuffles)
def test_stream_order_has_every_row_once_within_its_group(
    num_rows: int, stretch: int, lanes: int, shuffle: Shuffle
) -> None:
    order = order_of(num_rows, stretch, lanes, shuffle)
    rows = [int(row) for row in order.rows(range(num_rows))]
    assert sorted(rows) == list(range(num_rows))
    for start in range(0, num_rows, order.group_rows):
        group = rows[start : start + order.group_rows]
        assert sorted(group) == list(range(start, start + len(group)))
    places = np.arange(0, num_rows, 3)
    assert [int(row) for row in order.rows(places)] == rows[::3]


@given(st.integers(0, 90), st.integers(1, 9), st.integers(1, 5), shuffles)
def test_order_of_a_group_does_not_depend_on_later_rows(
    num_rows: int, stretch: int, lanes: int, shuffle: Shuffle
) -> None:
    whole = order_of(num_rows, stretch, lanes, shuffle)
    partly = StreamOrder(seed=1, epoch=0, shuffle=shuffle, lanes=lanes, stretch_rows=stretch)
    partly.set_known_rows(num_rows, is_all=False)
    assert partly.num_rows % partly.group_rows == 0 and num_rows - partly.num_rows < partly.group_rows
    known = range(partly.num_rows)
    assert list(partly.rows(known)) == list(whole.rows(known))


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 5), shuffles, st.integers(1, 40), st.integers(1, 5))
def test_steps_do_not_depend_on_the_number_of_workers(
    num_rows: int, stretch: int, lanes: int, shuffle: Shuffle, batch: int, world_size: int
) -> None:
    order = order_of(num_rows, stretch, lanes, shuffle)

    def steps(world_size: int) -> list[tuple[list[int], int]]:
        assignments = [
            RankAssignment(num_rows=num_rows, global_batch=batch, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        by_rank = [list(chain.from_iterable(assignment.steps(order, 0))) for assignment in assignments]
        return [([int(row) for rows, _ in step for row in rows], step[0][1]) for step in zip(*by_rank, strict=True)]

    assert steps(world_size) == steps(1)
    assert sorted(chain.from_iterable(rows for rows, _ in steps(1))) == list(range(num_rows))


def test_with_one_lane_per_worker_each_reads_its_own_stretches() -> None:
    order = order_of(80, 10, 2, "window")
    for rank in range(2):
        assignment = RankAssignment(num_rows=80, global_batch=4, rank=rank, world_size=2)
        rows = [int(row) for step in chain.from_iterable(assignment.steps(order, 0)) for row in step[0]]
        assert {row // 10 % 2 for row in rows} == {rank}
        assert rows != sorted(rows)


# -- reading --------------------------------------------------------------------------------------------------------


def test_rows_are_mixed_within_stretches_as_long_as_the_first_block_in_whole_steps() -> None:
    with hosted(rows_of(48)) as stream:
        (context,) = contexts(stream, 1)
        for _ in range(2):
            rows = list(chain(*epoch_of(context.get().get_split().iter_batches(4, shuffle="window"))))
            stretches = [rows[start : start + 8] for start in range(0, 48, 8)]
            assert [sorted(each) for each in stretches] == [list(range(start, start + 8)) for start in range(0, 48, 8)]
            assert sum(each != sorted(each) for each in stretches) >= 5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(counts.filter(lambda sizes: sum(sizes) <= 60), min_size=1, max_size=4),
    shuffles,
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(0, 4)), max_size=5),
    st.booleans(),
)
def test_every_row_comes_once_through_crashes_and_resizes_whatever_the_blocks(
    block_sizes: list[list[int]], shuffle: Shuffle, attempts: list[tuple[int, int, int, int]], is_global: bool
) -> None:
    """Each attempt has another number of workers and other blocks; it saves after some steps and crashes later."""
    num_rows = sum(block_sizes[0])
    dataset = LazyRows(lambda execution: _recut(block_sizes[execution % len(block_sizes)], num_rows))
    with hosted(dataset) as stream:
        saved: dict[str, Any] = {}
        trained: Counter[tuple[int, int]] = Counter()
        for attempt, (world_size, batch, kept, lost) in enumerate([*attempts, (2, 3, 10**6, 0)]):
            group = contexts(stream, world_size, json.loads(json.dumps(saved)), attempt=attempt, seed=7)
            size = {"global_batch_size": batch * 2} if is_global else {"batch_size": batch}
            done = 0
            while done < kept + lost and (not saved or saved[UNNAMED]["epoch"] < 2):
                before = group[0].get().position.epoch
                for step in lockstep(group, lambda shard, size=size: shard.iter_batches(**size, shuffle=shuffle)):
                    done += 1
                    if done <= kept:
                        trained.update((before, row) for row in chain.from_iterable(step))
                        saved = group[0].positions()
                    if done >= kept + lost:
                        break
                else:
                    if done <= kept:
                        saved = group[0].positions()
                    done += 1  # an epoch without rows counts as a step
            for context in group:
                context.close()
        assert trained == Counter((epoch, row) for epoch in range(2) for row in range(num_rows))
    assert _wait_until(lambda: dataset.num_closed == dataset.num_executions)


def _recut(sizes: Sequence[int], num_rows: int) -> list[int]:
    """Cut the same number of rows into other blocks."""
    found, left = [], num_rows
    for count in sizes:
        found.append(min(count, left))
        left -= found[-1]
    return [*found, left]


def _wait_until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("shuffle", [False, "window"])
def test_global_batches_of_a_lazy_dataset_do_not_depend_on_the_number_of_workers(shuffle: Shuffle) -> None:
    found = []
    for world_size in (1, 2, 3):
        with hosted(rows_of(101)) as stream:
            group = contexts(stream, world_size)
            steps = lockstep(group, lambda shard: shard.iter_batches(global_batch_size=6, shuffle=shuffle))
            found.append([list(chain.from_iterable(step)) for step in steps])
    assert found[0] == found[1] == found[2]
    assert sorted(chain.from_iterable(found[0])) == list(range(101))
    if shuffle is False:
        assert list(chain.from_iterable(found[0])) == list(range(101))


def test_break_ends_the_epoch_of_a_lazy_dataset() -> None:
    (context,) = contexts(inline(rows_of(23)), 1)
    batches = context.get().get_split().iter_batches(4)
    for _ in batches:
        break
    assert batches.epoch == 1
    assert sorted(chain.from_iterable(epoch_of(batches))) == list(range(23))
    assert batches.epoch == 2


def test_short_last_step_gives_remaining_rows_and_empty_batches() -> None:
    with hosted(rows_of(10)) as stream:
        steps = list(lockstep(contexts(stream, 3), lambda shard: shard.iter_batches(3)))
    assert [[len(rows) for rows in step] for step in steps] == [[3, 3, 3], [1, 0, 0]]
    with hosted(rows_of(10)) as stream:
        kept = list(lockstep(contexts(stream, 3), lambda shard: shard.iter_batches(3, drop_last=True)))
    assert kept == steps[:1]


def test_lazy_dataset_with_fewer_rows_than_workers() -> None:
    with hosted(rows_of(1)) as stream:
        steps = list(lockstep(contexts(stream, 3), lambda shard: shard.to_torch(2)))
    assert steps == [[[0], [], []]]
    with hosted(rows_of(0)) as stream:
        group = contexts(stream, 2)
        assert list(lockstep(group, lambda shard: shard.iter_batches(2))) == []
        assert group[0].get().schema.names == []
        with pytest.raises(ConfigError, match="has no rows"):
            group[1].get().get_split().iter_batches(2).first_batch()


def test_iter_rows_of_a_lazy_dataset() -> None:
    with hosted(rows_of(11)) as stream:
        group = contexts(stream, 2)
        found = [[row["x"] for row in context.get().get_split().iter_rows()] for context in group]
    assert sorted(chain(*found)) == list(range(11)) and [len(rows) for rows in found] == [6, 5]


def test_schema_and_first_batch_use_the_execution_of_the_next_loop() -> None:
    dataset = rows_of(40)
    (context,) = contexts(inline(dataset), 1)
    data = context.get()
    assert data.num_rows is None
    assert data.get_split().first_batch(3)["x"].tolist() == [0, 1, 2]
    assert data.schema.names == ["x"]
    with pytest.raises(ConfigError, match="no column 'X'"):
        data.get_split().to_torch(2, columns=["X"])
    assert sum(len(batch) for batch in epoch_of(data.get_split().to_torch(7))) == 40
    assert dataset.num_executions == 1
    for sized in (data.get_split(), data.get_split().to_torch(2), data.get_split().iter_rows()):
        with pytest.raises(TypeError, match="is unknown"):
            len(sized)


def test_full_shuffle_of_a_lazy_dataset_is_refused() -> None:
    (context,) = contexts(inline(rows_of(4)), 1)
    with pytest.raises(ConfigError, match=r"'window'.*random_shuffle.*materialize"):
        context.get().get_split().to_torch(2, shuffle="full")


def test_only_blocks_between_the_slowest_and_the_fastest_reader_are_held() -> None:
    dataset = rows_of(2_000)
    with hosted(dataset) as stream:
        max_held = 0
        for _ in lockstep(contexts(stream, 2), lambda shard: shard.iter_batches(5, shuffle="window")):
            max_held = max(max_held, stream.num_held())
        assert dataset.num_executions == 1
        assert max_held <= MOST_HELD
        assert _wait_until(lambda: stream.num_passes() == 0)


def test_late_worker_gets_its_own_execution() -> None:
    dataset = rows_of(200)
    with hosted(dataset) as stream:
        fast, late = contexts(stream, 2)
        loop = iter(fast.get().get_split().iter_batches(5))
        first = [next(loop)["x"].tolist() for _ in range(15)]
        late_batches = epoch_of(late.get().get_split().iter_batches(5))
        assert dataset.num_executions == 2
        remaining = [batch["x"].tolist() for batch in loop]
        assert sorted(chain(*first, *remaining, *late_batches)) == list(range(200))


def test_shard_of_another_rank_can_be_read_during_a_loop() -> None:
    with hosted(rows_of(60)) as stream:
        datasets, _ = contexts(stream, 2)
        own, other = (iter(datasets.get().get_shard(rank).iter_batches(3)) for rank in (0, 1))
        found = [batch["x"].tolist() for pair in zip(own, other, strict=True) for batch in pair]
    assert sorted(chain(*found)) == list(range(60))


@pytest.mark.parametrize("shuffle", [False, "window"])
def test_lost_execution_restarts_and_loops_continue(shuffle: Shuffle) -> None:
    """The restarted execution cuts other blocks."""
    dataset = LazyRows(lambda execution: [5] * 40 if execution % 2 == 0 else [7] * 28 + [4])
    with hosted(dataset) as stream:
        found = []
        for number, step in enumerate(
            lockstep(contexts(stream, 2), lambda shard: shard.iter_batches(3, shuffle=shuffle))
        ):
            found += step
            if number in (5, 6, 20):
                stream.restart()
        assert sorted(chain(*found)) == list(range(200))
        assert dataset.num_executions >= 3


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 25),
    shuffles,
    st.lists(st.integers(0, 30), max_size=4),
    st.integers(0, 150),
    st.booleans(),
)
def test_rows_come_once_whenever_the_execution_is_lost(
    world_size: int, batch: int, shuffle: Shuffle, losses: list[int], start: int, is_global: bool
) -> None:
    """Each execution cuts other blocks; steps may be longer than groups, and the epoch may be resumed in its middle."""
    dataset = LazyRows(lambda execution: [5] * 40 if execution % 2 == 0 else [7] * 28 + [4])
    sizes = {"global_batch_size": batch} if is_global else {"batch_size": batch}

    def make(shard: DatasetShard) -> Any:
        return shard.iter_batches(**sizes, shuffle=shuffle)

    with hosted(dataset) as stream:
        found: list[list[int]] = []
        first = contexts(stream, 1)
        for step in lockstep(first, make):
            found += step
            if len(list(chain(*found))) >= start:
                break
        else:
            return  # no row is left
        saved = _position_after(make, len(found))
        for number, step in enumerate(lockstep(contexts(stream, world_size, saved, attempt=1), make)):
            found += step
            if number in losses:
                stream.restart()
        assert sorted(chain(*found)) == list(range(200))


def _position_after(make: Callable[[DatasetShard], Any], steps: int) -> dict[str, Any]:
    """Return the positions after ``steps`` steps of a loop."""
    same = LazyRows(lambda _: [5] * 40)
    (context,) = contexts(inline(same), 1)
    loop = iter(make(context.get().get_split()))
    for _ in range(steps):
        next(loop)
    position = context.positions()
    context.close()
    return position


def test_resumed_epoch_is_executed_once_for_all_workers() -> None:
    dataset = rows_of(500)
    with hosted(dataset) as stream:
        group = contexts(stream, 2)
        loops = [iter(context.get().get_split().iter_batches(5)) for context in group]
        seen = [batch["x"].tolist() for _ in range(31) for batch in map(next, loops)]
        saved = group[0].positions()
        before = dataset.num_executions
        assert saved[UNNAMED]["consumed"] == 310
        remaining = []
        for step in lockstep(contexts(stream, 2, saved, attempt=1), lambda shard: shard.iter_batches(5)):
            remaining += step
            assert stream.num_held() <= MOST_HELD
        assert sorted(chain(*seen, *remaining)) == list(range(500))
        assert dataset.num_executions == before + 1
        for loop in loops:
            loop.close()
        assert _wait_until(lambda: stream.num_passes() == 0)


def test_first_batches_leave_no_pass_open_and_do_not_disturb_a_loop() -> None:
    dataset = rows_of(300)
    with hosted(dataset) as stream:
        (context,) = contexts(stream, 1)
        shard = context.get().get_split()
        batches = shard.to_torch(4)
        context.restore({})  # as load_checkpoint does
        seen = []
        for number, batch in enumerate(batches):
            seen += batch["x"].tolist()
            if number in (0, 1, 7, 20, 50):
                assert batches.first_batch()["x"].tolist() == [0, 1, 2, 3]
        assert sorted(seen) == list(range(300))
        assert _wait_until(lambda: stream.num_passes() == 0)
        assert batches.first_batch()["x"].tolist() == [0, 1, 2, 3]
        context.close()
        assert _wait_until(lambda: stream.num_passes() == 0)


def test_late_ranks_and_lost_executions_keep_the_first_stretch_length() -> None:
    """Later executions cut their first block elsewhere."""
    dataset = LazyRows(lambda execution: [4] * 50 if execution == 0 else [1] * 10 + [19] * 10)
    with hosted(dataset) as stream:
        early, late = contexts(stream, 2)
        loop = iter(early.get().get_split().iter_batches(2, shuffle="window"))
        seen = [next(loop)["x"].tolist() for _ in range(25)]
        stream.restart()
        seen += epoch_of(late.get().get_split().iter_batches(2, shuffle="window"))
        seen += [batch["x"].tolist() for batch in loop]
        assert sorted(chain(*seen)) == list(range(200))


def test_dataset_under_two_names_has_two_positions() -> None:
    dataset = rows_of(100)
    with hosted(dataset) as stream:
        source = Source("stream", (stream,), ())
        context = WorkerDatasets(DatasetPlan({"a": source, "b": source}), 0, 1, 0, fetch=_same)
        seen = []
        for batch in context.get("a").get_split().iter_batches(4):
            seen += batch["x"].tolist()
            for _ in context.get("b").get_split().iter_batches(4):
                break
        assert seen == list(range(100))


def test_ranks_whose_orders_differ_do_not_agree() -> None:
    at = {"epoch": 0, "consumed": 8, "num_rows": -1, "seed": 0, "shuffle": False, "layout": 4, "lanes": 2}
    check_agreement({0: {"x": at}, 1: {"x": at}})
    with pytest.raises(CheckpointError, match=r"an order of 2 lanes \(4\) on rank 0; .* \(5\) on rank 1"):
        check_agreement({0: {"x": at}, 1: {"x": at | {"layout": 5}}})


def test_missing_rows_after_a_loss_are_reported_as_not_deterministic() -> None:
    dataset = LazyRows(lambda execution: [5] * 40 if execution == 0 else [5] * 2)
    with hosted(dataset) as stream:
        (context,) = contexts(stream, 1)
        loop = iter(context.get().get_split().iter_batches(3))
        for _ in range(12):
            next(loop)
        stream.restart()
        with pytest.raises(DataError, match="not deterministic"):
            list(loop)
        context.close()


def test_failed_execution_ends_the_loop_and_keeps_the_position() -> None:
    with hosted(LazyRows(lambda _: [5] * 10, fails_at=32)) as stream:
        (context,) = contexts(stream, 1)
        seen: list[int] = []

        def loop() -> None:
            for batch in context.get().get_split().iter_batches(5):
                seen.extend(batch["x"].tolist())

        with pytest.raises(DataError, match=r"dataset 'dataset' could not be executed: ValueError: row 32 is bad"):
            loop()
        assert context.get().position.consumed == len(seen) > 0
        assert context.get().position.epoch == 0


def test_position_in_a_lazy_dataset_is_refused_for_another_kind() -> None:
    (context,) = contexts(inline(rows_of(40)), 1)
    loop = iter(context.get().get_split().iter_batches(4))
    for _ in range(6):
        next(loop)
    saved = context.positions()
    assert json.loads(json.dumps(saved)) == saved
    (shorter,) = contexts(inline(rows_of(20)), 1, saved)
    with pytest.raises(CheckpointError, match=r"24 rows consumed\), which has 20 rows now"):
        list(shorter.get().get_split().iter_batches(4))
    loop.close()
    (same,) = contexts(inline(rows_of(40)), 1, saved)
    with pytest.raises(ConfigError, match="order is that of shuffle=False"):
        next(iter(same.get().get_split().iter_batches(4, shuffle="window")))
    table = DatasetPlan({UNNAMED: Source("arrays", ({"x": np.arange(40)},), (40,))})
    with pytest.raises(CheckpointError, match=r"24 rows consumed\), which has 40 rows now"):
        WorkerDatasets(table, 0, 1, 0, saved, fetch=_same)
    with pytest.raises(CheckpointError, match="is a lazy dataset now"):
        contexts(inline(rows_of(40)), 1, {UNNAMED: {"epoch": 0, "consumed": 3, "num_rows": 40}})


def test_reader_of_another_execution_gets_stream_lost() -> None:
    with hosted(rows_of(20)) as stream:
        known = stream.wait_for_rows((0, "a"), 0, 0, 10, ReaderState(), _never)
        assert sum(known.block_rows) >= 10 and known.columns == ("x",)
        again = stream.wait_for_rows((0, "a"), 0, 0, 20, ReaderState(len(known.block_rows), known.execution), _never)
        assert sum(known.block_rows) + sum(again.block_rows) == 20
        with pytest.raises(StreamLostError):
            stream.wait_for_rows((0, "a"), 0, 0, 20, ReaderState(1, "another"), _never)
        assert stream.wait_for_rows((1, "a"), 0, 0, 1, ReaderState(), _never).error is None
        assert "a later attempt" in (stream.wait_for_rows((0, "a"), 0, 0, 1, ReaderState(), _never).error or "")


def test_long_wait_for_a_block_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_host, "WAIT_WARNING_S", 0.02)
    waited: list[int] = []

    class WatchedHost(stream_host.StreamHost):
        def on_long_wait(self) -> None:
            waited.append(1)

    def block_sizes(execution: int) -> Iterator[int]:
        while len(waited) < 3:
            time.sleep(0.01)
        yield 5

    with hosted(LazyRows(block_sizes), WatchedHost) as stream:
        (context,) = contexts(stream, 1)
        assert epoch_of(context.get().get_split().iter_batches(5)) == [[0, 1, 2, 3, 4]]
    assert len(waited) >= 3


def test_error_summary_is_the_last_line_of_the_cause() -> None:
    assert summarize_error(ValueError("bad")) == "ValueError: bad"
    assert (
        summarize_error(RuntimeError("ray::map()\n  File x\nValueError: row 3 is bad\n")) == "ValueError: row 3 is bad"
    )
    assert summarize_error(KeyError()) == "KeyError"
    wrapped = (
        "ray::f()\n  File x\nValueError: row 3\n\nThe above exception was the direct cause of it:\n\nHow to retry: ..."
    )
    assert summarize_error(RuntimeError(wrapped)) == "ValueError: row 3"


# -- read whole ---------------------------------------------------------------------------------------------------------


def test_lazy_dataset_is_read_whole_on_every_rank_in_addition_to_its_shards() -> None:
    with hosted(rows_of(60)) as stream:
        group = contexts(stream, 2)
        training = lockstep(group, lambda shard: shard.iter_batches(3))
        seen = next(training)
        for context in group:
            whole = context.get().get_split(whole=True)
            assert list(chain(*epoch_of(whole.iter_batches(7)))) == list(range(60))
        for step in training:
            seen += step
        assert sorted(chain(*seen)) == list(range(60))
        for context in group:
            context.close()
        assert stream.num_passes() == 0


def test_one_rank_alone_reads_a_lazy_dataset_whole_and_resumes_inside() -> None:
    with hosted(rows_of(30)) as stream:
        one = contexts(stream, 2)[1]
        loop = iter(one.get().get_split(whole=True).iter_batches(4))
        assert next(loop)["x"].tolist() == [0, 1, 2, 3]
        saved = json.loads(json.dumps(one.own_positions()))
        loop.close()
        one.close()
        (resumed,) = contexts(stream, 1, attempt=1)
        resumed.restore({}, saved)
        remaining = resumed.get().get_split(whole=True).iter_batches(30)
        assert [batch["x"].tolist() for batch in remaining] == [list(range(4, 30))]
        resumed.close()
