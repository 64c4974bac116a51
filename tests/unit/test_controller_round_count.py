"""Readers get a round when it is complete, and no later than `RoundMerger` can make a result of it."""

from __future__ import annotations

import json

import hypothesis.strategies as st
from hypothesis import given

from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.rounds import RoundCount, RoundMerger


def attempt(number: int, world_size: int) -> Frame:
    data = {"attempt": number, "world_size": world_size, "iterations_before": 0, "time_before_s": 0.0}
    return Frame(0, frames.ATTEMPT, number, data=data)


def reports(rank: int, count: int = 1, number: int = 1) -> Frame:
    rows = json.dumps([[0.0, 0.0, {"x": 1}]] * count).encode()
    return Frame(0, frames.REPORTS, number, rank, {"first": 0, "count": count}, rows)


def done(rank: int, number: int = 1) -> Frame:
    return Frame(0, frames.RANK_DONE, number, rank)


def released(*sequence: Frame) -> list[bool]:
    rounds = RoundCount()
    return [rounds.feed(frame) for frame in sequence]


def test_round_is_released_with_its_last_report() -> None:
    assert released(attempt(1, 3), reports(1), reports(0), reports(2)) == [True, False, False, True]


def test_rank_that_is_ahead_waits_for_the_others() -> None:
    assert released(attempt(1, 2), reports(0, 5), reports(1), reports(1), reports(0)) == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_rank_that_has_left_is_not_waited_for() -> None:
    assert released(attempt(1, 2), done(1), reports(0), reports(0)) == [True, True, True, True]


def test_other_frames_are_released_at_once() -> None:
    kinds = [frames.EVENT, frames.CHECKPOINT, frames.RUN_END, frames.RUN_CLOSED]
    assert released(attempt(1, 2), *(Frame(0, kind, 1, data={"kind": "x"}) for kind in kinds)) == [True] * 5


def test_reports_of_an_older_attempt_do_not_count() -> None:
    assert released(attempt(1, 1), attempt(2, 1), reports(0, number=1), reports(0, number=2))[2:] == [True, True]


@given(st.data())
def test_no_result_is_delayed(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 4))
    rounds, merger = RoundCount(), RoundMerger()
    running = set(range(world_size))
    for frame in [attempt(1, world_size)]:
        rounds.feed(frame)
        list(merger.feed(frame))
    for _ in range(data.draw(st.integers(0, 40))):
        if not running:
            break
        rank = data.draw(st.sampled_from(sorted(running)))
        leaves = data.draw(st.integers(0, 9)) == 0
        frame = done(rank) if leaves else reports(rank, data.draw(st.integers(1, 3)))
        running -= {rank} if leaves else set()
        results = list(merger.feed(frame))
        is_released = rounds.feed(frame)
        assert is_released or not results
        if frame.kind == frames.REPORTS and is_released:
            assert results


def test_last_round_stays_the_last_one_when_all_ranks_have_left() -> None:
    rounds = RoundCount()
    iterations = []
    for frame in (attempt(1, 2), reports(0, 3), reports(1, 2), done(0), done(1)):
        rounds.feed(frame)
        iterations.append(rounds.iteration)
    assert iterations == [0, 0, 2, 2, 3]


def test_reports_are_decoded_once_and_count_with_the_memory_that_they_take() -> None:
    frame = reports(0, 50)
    encoded_bytes = frame.size_bytes
    mergers = RoundMerger(), RoundMerger({"x": "mean"})
    for merger in mergers:
        list(merger.feed(attempt(1, 1)))
        assert len(list(merger.feed(frame))) == 50
    assert frame.decoded is frame.decoded
    assert frame.size_bytes > 5 * encoded_bytes
