"""The order of rows and the ranks' part in it: every row once per epoch, through crashes and resizes."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from itertools import chain, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raysgd.data.order.cursor import Cursor
from raysgd.data.order.epoch_order import SHUFFLES, EpochOrder, Shuffle
from raysgd.data.order.position import Position, check_agreement
from raysgd.data.order.rank_assignment import RankAssignment
from raysgd.data.order.stream_order import StreamOrder
from raysgd.errors import CheckpointError

blocks = st.lists(st.integers(0, 40), max_size=8)
shuffles = st.sampled_from(SHUFFLES)
seeds = st.integers(0, 2**63)
sizes = st.integers(1, 7)
lane_counts = st.integers(1, 6)


def order_of(
    block_rows: list[int], seed: int, epoch: int, shuffle: Shuffle, window_rows: int = 16, lanes: int = 1
) -> EpochOrder:
    return EpochOrder(block_rows, seed=seed, epoch=epoch, shuffle=shuffle, window_rows=window_rows, lanes=lanes)


def all_rows(order: EpochOrder) -> list[int]:
    return list(order.rows(range(order.num_rows)))


def assignments(num_rows: int, batch: int, world_size: int, drop_last: bool = False) -> list[RankAssignment]:
    settings_ = {"num_rows": num_rows, "global_batch": batch * world_size, "drop_last": drop_last}
    return [RankAssignment(rank=rank, world_size=world_size, **settings_) for rank in range(world_size)]


def steps_of(group: list[RankAssignment], order: EpochOrder, start: int) -> list[tuple[list[list[int]], int]]:
    """Return the steps from ``start`` on: the rows of each rank, and the end of the step, which must be equal on all ranks."""
    by_rank = [[step for some in assignment.steps(order, start) for step in some] for assignment in group]
    found = []
    for at_once in zip(*by_rank, strict=True):
        (stop,) = {stop for _, stop in at_once}
        found.append(([[int(row) for row in rows] for rows, _ in at_once], stop))
    return found


@pytest.mark.parametrize(
    ("shuffle", "lanes", "rows"),
    [
        ("full", 1, [4, 5, 3, 11, 0, 9, 2, 10, 1, 6, 7, 8]),
        ("window", 1, [2, 3, 0, 1, 4, 7, 6, 5, 10, 11, 8, 9]),
        ("window", 2, [1, 6, 2, 9, 3, 7, 0, 8, 4, 11, 5, 10]),
        (False, 2, [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]),
    ],
)
def test_order_is_the_one_that_saved_positions_belong_to(shuffle: Shuffle, lanes: int, rows: list[int]) -> None:
    """A checkpoint has a number of rows of this order: those of another order would come twice, or never."""
    assert all_rows(order_of([5, 0, 7], 0, 0, shuffle, window_rows=4, lanes=lanes)) == rows


@pytest.mark.parametrize(
    ("block_rows", "seed", "epoch", "shuffle", "lanes", "checksum"),
    [
        ([1000] * 7, 3, 2, "full", 1, 1851048917),
        ([1000] * 7, 3, 2, "window", 1, 631287129),
        ([1000] * 7, 2**63, 5, "window", 3, 1759415192),
        ([2**17], 1, 0, "full", 1, 631015281),
        ([2**34], 1, 0, "full", 2, 2443179263),
    ],
)
def test_order_of_many_rows_is_the_one_that_saved_positions_belong_to(
    block_rows: list[int], seed: int, epoch: int, shuffle: Shuffle, lanes: int, checksum: int
) -> None:
    rows = order_of(block_rows, seed, epoch, shuffle, window_rows=256, lanes=lanes).rows(range(7000))
    assert zlib.crc32(np.asarray(rows, dtype="<i8").tobytes()) == checksum


def test_order_of_a_stream_is_the_one_that_saved_positions_belong_to() -> None:
    order = StreamOrder(seed=3, epoch=1, shuffle="window", lanes=2, stretch_rows=50)
    order.set_known_rows(970, is_all=True)
    rows = np.asarray(order.rows(range(970)), dtype="<i8")
    assert rows[-10:].tolist() == [919, 969, 910, 948, 912, 965, 929, 954, 911, 950]
    assert zlib.crc32(rows.tobytes()) == 52908601


def test_rows_of_a_stream_that_is_not_shuffled_are_read_as_ranges() -> None:
    order = StreamOrder(seed=0, epoch=0, shuffle=False, stretch_rows=50)
    order.set_known_rows(100, is_all=True)
    assert order.rows(range(40, 60)) == range(40, 60)


@pytest.mark.parametrize(
    ("batch", "world_size", "size", "is_even"), [(8, 2, 8, True), (8, 2, 6, False), (9, 2, 9, False), (8, 3, 8, False)]
)
def test_whole_steps_that_divide_are_even(batch: int, world_size: int, size: int, is_even: bool) -> None:
    assert RankAssignment(num_rows=100, global_batch=batch, rank=0, world_size=world_size).is_even(size) is is_even


@pytest.mark.parametrize(
    ("block_rows", "block_bytes", "global_batch", "stretch_rows"),
    [
        (1000, 1_024_000, 100, 16_400),  # 16 MiB of 1 KiB each, in whole steps
        (65_536, 64 * 2**20, 100, 65_600),  # the first block
        (2**20, 2**30, 100, 131_100),  # 128 MiB
        (10, 10 * 2**28, 3, 3),  # rows larger than 128 MiB
        (0, 0, 64, 2**24),
    ],
)
def test_stretch_of_a_stream_is_as_long_as_its_first_block_between_16_and_128_mib(
    block_rows: int, block_bytes: int, global_batch: int, stretch_rows: int
) -> None:
    order = StreamOrder(seed=0, epoch=0, shuffle=False)
    order.choose_stretch_rows(block_rows, block_bytes, global_batch)
    assert order.stretch_rows == stretch_rows


@given(blocks, seeds, st.integers(0, 5), shuffles, lane_counts)
def test_order_has_every_row_once_and_can_be_computed_in_parts(
    block_rows: list[int], seed: int, epoch: int, shuffle: Shuffle, lanes: int
) -> None:
    order = order_of(block_rows, seed, epoch, shuffle, lanes=lanes)
    rows = all_rows(order)
    assert sorted(rows) == list(range(sum(block_rows)))
    again = order_of(block_rows, seed, epoch, shuffle, lanes=lanes)
    places = np.arange(0, len(rows), 3)
    assert list(again.rows(places)) == rows[::3]


@given(blocks, seeds, shuffles, st.integers(1, 40), lane_counts, sizes)
def test_global_batches_do_not_depend_on_the_number_of_workers(
    block_rows: list[int], seed: int, shuffle: Shuffle, global_batch: int, lanes: int, world_size: int
) -> None:
    order = order_of(block_rows, seed, 0, shuffle, lanes=lanes)
    single_worker = steps_of(
        [RankAssignment(num_rows=order.num_rows, global_batch=global_batch, rank=0, world_size=1)], order, 0
    )
    group = [
        RankAssignment(num_rows=order.num_rows, global_batch=global_batch, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    all_ranks = steps_of(group, order, 0)
    assert [list(chain(*rows_by_rank)) for rows_by_rank, _ in all_ranks] == [
        rows_of_rank for (rows_of_rank,), _ in single_worker
    ]
    assert [stop for _, stop in all_ranks] == [stop for _, stop in single_worker]


@given(blocks, shuffles, sizes, st.integers(1, 9), st.booleans())
def test_num_steps_counts_the_steps_and_only_the_last_may_be_short(
    block_rows: list[int], shuffle: Shuffle, world_size: int, batch: int, drop_last: bool
) -> None:
    order = order_of(block_rows, 1, 2, shuffle)
    group = assignments(order.num_rows, batch, world_size, drop_last)
    steps = steps_of(group, order, 0)
    assert len(steps) == group[0].num_steps
    whole = steps if drop_last else steps[:-1]
    assert all(len(rows_of_rank) == batch for rows_by_rank, _ in whole for rows_of_rank in rows_by_rank)
    tail = [len(rows_of_rank) for rows_by_rank, _ in steps[-1:] for rows_of_rank in rows_by_rank]
    assert tail == sorted(tail, reverse=True)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), max_size=6),
    seeds,
    shuffles,
    st.lists(st.tuples(sizes, st.integers(1, 9), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12),
    st.booleans(),
)
def test_every_row_comes_once_per_epoch_through_crashes_and_resizes(
    block_rows: list[int], seed: int, shuffle: Shuffle, attempts: list[tuple[int, int, int, int]], has_lanes: bool
) -> None:
    """Each attempt has other numbers of workers and rows per batch, saves after some steps, makes more steps, and crashes.

    With lanes, there is one lane per worker of the group that began the epoch.
    """
    num_rows = sum(block_rows)
    saved: dict[str, Any] = Position().to_json()
    trained: Counter[tuple[int, int]] = Counter()
    for world_size, batch, num_kept, num_lost in attempts:
        cursor = Cursor("x", block_rows, seed, Position.from_json(json.loads(json.dumps(saved)), "x"))
        group = assignments(num_rows, batch, world_size)
        for step, rows in enumerate(
            walk_epochs(cursor, group, shuffle, num_kept + num_lost, world_size if has_lanes else 1), 1
        ):
            if step <= num_kept:
                trained.update(rows)
                saved = cursor.position.to_json()
    cursor = Cursor("x", block_rows, seed, Position.from_json(saved, "x"))
    last_epoch = cursor.epoch
    for rows in walk_epochs(cursor, assignments(num_rows, 3, 2), shuffle, num_rows):
        trained.update(row for row in rows if row[0] == last_epoch)
    assert trained == Counter((epoch, row) for epoch in range(last_epoch + 1) for row in range(num_rows))


def walk_epochs(cursor: Cursor, group: list[RankAssignment], shuffle: Shuffle, num_steps: int, lanes: int = 1) -> Any:
    """Yield ``(epoch, row)`` of all ranks for ``num_steps`` steps, over as many epochs as necessary."""
    done = 0
    while done < num_steps and group[0].num_rows:
        epoch = cursor.epoch
        iteration_in_progress = cursor.begin(shuffle, lanes)
        for rows_by_rank, stop in steps_of(group, iteration_in_progress.order, iteration_in_progress.start):
            iteration_in_progress.consume(stop)
            yield [(epoch, row) for rows_of_rank in rows_by_rank for row in rows_of_rank]
            done += 1
            if done >= num_steps:
                return
        iteration_in_progress.end()


@given(blocks, seeds, shuffles, lane_counts, sizes, st.integers(1, 40))
@example([3], 0, False, 6, 2, 2)  # fewer rows in a step than lanes
def test_spans_bound_the_places_of_each_block_and_lanes_of_rank_its_rows(
    block_rows: list[int], seed: int, shuffle: Shuffle, lanes: int, world_size: int, global_batch: int
) -> None:
    order = order_of(block_rows, seed, 0, shuffle, lanes=lanes)
    ends = np.cumsum(block_rows)
    for rank in range(world_size):
        assignment = RankAssignment(
            num_rows=order.num_rows, global_batch=global_batch, rank=rank, world_size=world_size
        )
        spans = order.spans(block_rows, assignment.lanes_of_rank(order.lanes))
        assert list(spans.first) == sorted(spans.first)
        message = {number: (first, until) for number, first, until in zip(*map(np.ndarray.tolist, spans), strict=True)}
        start = 0
        for steps in assignment.steps(order, start):
            for rows, stop in steps:
                if stop - start == global_batch:  # the last step may be short, and of other lanes
                    for number in np.searchsorted(ends, np.asarray(rows, np.int64), side="right").tolist():
                        first, until = message[number]
                        assert first < stop and until > start
                start = stop


@given(lane_counts, sizes, st.integers(1, 40))
@example(3, 4, 40)
def test_rank_reads_the_lanes_of_its_rows_and_at_most_one_more_at_either_end(
    lanes: int, world_size: int, global_batch: int
) -> None:
    for rank in range(world_size):
        assignment = RankAssignment(num_rows=100, global_batch=global_batch, rank=rank, world_size=world_size)
        read = assignment.lanes_of_rank(lanes)
        assert set(read) <= set(range(lanes))
        if global_batch >= lanes:
            num_rows = global_batch * (rank + 1) // world_size - global_batch * rank // world_size
            assert len(read) <= num_rows * lanes / global_batch + 4


def test_with_one_lane_per_worker_blocks_are_released_in_turn() -> None:
    block_rows = [10] * 8
    for shuffle in (False, "window"):
        order = order_of(block_rows, 0, 0, shuffle, window_rows=10, lanes=2)
        for lane in range(2):
            spans = order.spans(block_rows, range(lane, lane + 1))
            assert len(set(spans.blocks)) == 4
            assert spans.first.tolist() == [lane, 20 + lane, 40 + lane, 60 + lane]
            assert spans.until.tolist() == [19 + lane, 39 + lane, 59 + lane, 79 + lane]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_with_one_lane_per_worker_no_block_is_read_by_two_workers(world_size: int) -> None:
    block_rows = [60] * 8
    for shuffle in (False, "window"):
        order = order_of(block_rows, 3, 1, shuffle, lanes=world_size)
        steps = steps_of(assignments(order.num_rows, 7, world_size), order, 0)
        assert len(steps) == -(-480 // (7 * world_size))
        full = [rows_by_rank for rows_by_rank, _ in steps[:-1]]
        read = [{row // 60 for rows_by_rank in full for row in rows_by_rank[rank]} for rank in range(world_size)]
        assert sum(map(len, read)) == len(set().union(*read)) == 8


def test_without_shuffling_a_worker_reads_its_lane_in_order_as_ranges() -> None:
    order = order_of([60] * 4, 0, 0, False, lanes=2)
    for assignment, first in zip(assignments(240, 7, 2), (0, 120), strict=True):
        rows = [rows for steps in assignment.steps(order, 0) for rows, _ in steps]
        assert all(isinstance(each, range) for each in rows[:-1])
        assert list(chain(*rows[:-1])) == list(range(first, first + 119))  # the short last step has rows of both lanes


@given(st.integers(0, 9), st.integers(0, 100), st.integers(0, 100), seeds, shuffles, lane_counts)
def test_a_position_survives_json(
    epoch: int, consumed: int, left: int, seed: int, shuffle: Shuffle, lanes: int
) -> None:
    position = Position(
        epoch=epoch, consumed=consumed, num_rows=consumed + left, seed=seed, shuffle=shuffle, layout=7, lanes=lanes
    )
    restored = Position.from_json(json.loads(json.dumps(position.to_json())), "x")
    assert restored == (position if consumed else Position(epoch=epoch))


@pytest.mark.parametrize(
    "value",
    [
        None, {}, {"epoch": 1}, {"epoch": -1, "consumed": 0}, {"epoch": True, "consumed": 0}, {"epoch": 0, "consumed": 1.5},
        {"epoch": 0, "consumed": 5}, {"epoch": 0, "consumed": 5, "num_rows": 4}, {"epoch": 0, "consumed": 0, "more": 1},
        {"epoch": 0, "consumed": 0, "lanes": 0},
    ],
)  # fmt: skip
def test_invalid_position_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"position in dataset 'train' is .*, which is not a position"):
        Position.from_json(value, "train")


@pytest.mark.parametrize("shuffle", ["window", "full"])
def test_orders_differ_by_seed_and_epoch(shuffle: Shuffle) -> None:
    def mixed(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(all_rows(order_of([100] * 5, seed, epoch, shuffle)))

    assert len({mixed(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25


def test_full_shuffle_mixes_the_whole_dataset() -> None:
    rows = np.array(all_rows(order_of([100_000], 0, 0, "full")))
    tenths = [np.bincount(batch * 10 // 100_000, minlength=10) for batch in rows.reshape(100, 1000)]
    assert np.min(tenths) > 50 and np.max(tenths) < 160  # 100 +- 9.5
    assert np.std(tenths) == pytest.approx(9.5, rel=0.15)  # as even as random draws are
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 0.02


def test_all_orders_of_few_rows_are_about_equally_likely() -> None:
    seen = Counter(tuple(all_rows(order_of([4], seed, 0, "full"))) for seed in range(2400))
    assert set(seen) == set(permutations(range(4)))
    assert max(seen.values()) < 160 and min(seen.values()) > 55  # 100 each


def test_window_shuffle_needs_few_blocks_at_a_time() -> None:
    rows = np.array(all_rows(order_of([64] * 50, 3, 0, "window", window_rows=128)))
    of_window = [len(np.unique(window // 64)) for window in rows.reshape(-1, 128)]
    assert of_window == [2] * 25
    assert list(rows // 64) != sorted(rows // 64)
    of_one_block = np.array(all_rows(order_of([256], 3, 0, "window", window_rows=128)))
    first, second = of_one_block.reshape(2, 128)
    assert sorted(first) == list(range(128)) and list(second - 128) != list(first)


def test_ranks_that_saved_at_different_positions_are_named() -> None:
    at = {"epoch": 1, "consumed": 4, "num_rows": 9}
    check_agreement({0: {"train": at}, 1: {"train": dict(at)}})
    with pytest.raises(
        CheckpointError, match=r"dataset 'train': epoch 1, 4 rows consumed on ranks 0, 2; epoch 1, 8 .* rank 1\."
    ):
        check_agreement({0: {"train": at}, 1: {"train": at | {"consumed": 8}}, 2: {"train": at}})
    with pytest.raises(CheckpointError, match="no position on rank 1"):
        check_agreement({0: {"train": at}, 1: {}})


@settings(max_examples=20)
@given(st.integers(1, 2**40), st.data())
def test_rows_of_a_huge_dataset_are_computed_for_the_requested_places_only(num_rows: int, data: st.DataObject) -> None:
    order = EpochOrder([num_rows], seed=0, epoch=0, shuffle="full")
    start = data.draw(st.integers(0, num_rows - 1))
    rows = order.rows(range(start, min(start + 100, num_rows)))
    assert len(np.unique(rows)) == len(rows) and min(rows) >= 0 and max(rows) < num_rows
