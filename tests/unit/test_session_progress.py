"""Where the time of train_func went: steps and stopwatches, with a fake clock."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raysgd
from raysgd.session import context
from raysgd.session.local import LocalSession
from raysgd.session.progress import Progress, Spent, count_values

CALLS = st.sampled_from(["report", "batch", "save_checkpoint", "barrier", "work"])


class Clock:
    now = 3.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(CALLS, st.floats(0.0, 10.0)), max_size=40))
def test_time_up_to_the_last_step_is_divided_into_parts(calls: list[tuple[str, float]]) -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.now += 100  # forming the group
    progress.enter()
    spent = {"data": 0.0, "checkpoint": 0.0, "waiting": 0.0}
    counts = {"report": 0, "batch": 0}
    expected = Spent()
    for call, seconds in calls:
        if call != "work":
            progress.mark(call)
        if call in counts:
            counts[call] += 1
            if max(counts.values()) > expected.steps:
                expected = Spent(max(counts.values()), clock.now - 103, spent["data"])
        watch = {"batch": "data", "save_checkpoint": "checkpoint", "barrier": "waiting"}.get(call)
        if watch is None:
            clock.now += seconds
        else:
            with getattr(progress, watch):
                clock.now += seconds
            spent[watch] += seconds
    assert progress.spent == pytest.approx(expected)


def test_idle_time_is_since_the_newest_call_and_the_longest_pause_between_two_calls() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.enter()
    for seconds, call in (
        (50, "report"),
        (7, "barrier"),
        (2, "report"),
    ):  # 50 s before the first call
        clock.now += seconds
        progress.mark(call)
    clock.now += 1
    heartbeat = progress.heartbeat(is_inside=True)
    assert (heartbeat.calls, heartbeat.idle_s, heartbeat.longest_pause_s, heartbeat.phase) == (3, 1, 7, "report")


def test_nested_stopwatch_counts_once() -> None:
    clock = Clock()
    watch = Progress(clock).data
    with watch:
        clock.now += 1
        with watch:
            clock.now += 2
        clock.now += 4
    assert watch.seconds == 7


def test_time_of_other_threads_is_not_counted() -> None:
    """A thread of the user's that reads ahead: the training thread does not wait for its batches."""
    clock = Clock()
    progress = Progress(clock)

    def read_ahead() -> None:
        with progress.data:
            clock.now += 1

    thread = threading.Thread(target=read_ahead)
    with progress.checkpoint:
        thread.start()
        thread.join()
    assert (progress.data.seconds, progress.checkpoint.seconds) == (0.0, 1.0)
    thread = threading.Thread(target=lambda: (progress.enter(), read_ahead()))
    thread.start()
    thread.join()
    assert progress.data.seconds == 1.0, "the thread that enters train_func is the one that counts"


def test_waiting_for_storage_is_progress_while_storage_writes() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.enter()
    progress.mark("save_checkpoint")
    with progress.checkpoint:
        clock.now += 30
        progress.wrote()
        clock.now += 5
        assert progress.heartbeat(is_inside=True).idle_s == 5
        clock.now += 60
        assert progress.heartbeat(is_inside=True).idle_s == 65, "storage that takes nothing any more"
    assert progress.heartbeat(is_inside=True).idle_s == 95, "background writing is not progress of train_func"


class Slow:
    """A map-style dataset."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return float(index)


@pytest.mark.parametrize("how", ["to_torch", "iter_rows", "loader"])
def test_reading_a_batch_is_timed_and_using_it_is_not(how: str) -> None:
    from torch.utils.data import DataLoader

    with raysgd.local(dataset=Slow()) as session:
        shard = raysgd.get_dataset().get_split()
        dataset: Any = Slow()
        batches: Any = {
            "to_torch": lambda: shard.to_torch(2, prefetch=0),
            "iter_rows": shard.iter_rows,
            "loader": lambda: raysgd.torch.prepare_data_loader(DataLoader(dataset, batch_size=2)),
        }[how]()
        began = time.monotonic()
        used_s = 0.0
        for _ in batches:
            start = time.monotonic()
            time.sleep(0.02)
            used_s += time.monotonic() - start
        read_s = time.monotonic() - began - used_s
        assert 0.06 <= session.progress.data.seconds <= read_s
        num_batches = 6 if how == "iter_rows" else 3
        assert session.progress.spent.steps == num_batches
        if how != "iter_rows":
            ((count, rows, values, computed_s, *_),) = session.progress.batches.sums.values()
            assert rows == values == 2 * count > 0
            assert computed_s >= 0.02 * count


def test_local_session_has_progress() -> None:
    assert isinstance(context.current(), LocalSession)
    assert isinstance(context.current().progress, Progress)


def test_time_after_a_pass_of_an_evaluation_is_evaluation_up_to_the_next_training_pass() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.enter()
    batch = np.ones((2, 3))
    for call, seconds in (
        ("evaluation", 1),
        ("batch", 2),
        ("training", 4),
        ("batch", 8),
        ("evaluation", 16),
        ("batch", 32),
    ):
        if call == "batch":
            with progress.data:
                progress.mark("batch")
            progress.batches.add("train", batch)
        else:
            progress.on_pass((lambda: False) if call == "evaluation" else None)
        clock.now += seconds
    progress.on_pass(None)
    clock.now += 64
    assert progress.uses() == {"setup": 1, "training": 2 + 4 + 8 + 64, "evaluation": 16 + 32}
    # The first batch was trained with; of the second the pass of an evaluation followed, and the third is one of it.
    assert progress.batches.sums["train"][:4] == [1, 2, 6, 2 + 4]


def test_a_garbage_collection_in_the_reading_counts_nothing_twice() -> None:
    """It may begin at any allocation, which the number of objects before it decides."""
    threshold = gc.get_threshold()
    try:
        for number in range(80):
            clock = Clock()
            progress = Progress(clock)
            progress.enter()
            with progress.timed_garbage_collection():
                gc.set_threshold(10_000)
                gc.collect()
                clock.now += 1000
                gc.set_threshold(80)
                kept: list[list[int]] = [[] for _ in range(number)]
                uses = progress.uses()
            assert len(kept) == number and sum(uses.values()) == 1000, number
    finally:
        gc.set_threshold(*threshold)


def test_time_since_the_last_step_is_known_by_use() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.enter()
    clock.now += 1
    assert progress.since_last_step() == {}
    for seconds in (2, 4):
        progress.mark("report")
        clock.now += seconds
    with progress.checkpoint:
        clock.now += 8
    assert progress.since_last_step() == {"training": 4, "checkpoint": 8}
    assert progress.uses() == {"setup": 1, "training": 2 + 4, "checkpoint": 8}


def test_evaluation_ends_when_the_model_is_to_be_trained_again() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.enter()
    progress.mark("report")
    model = SimpleNamespace(training=False)
    for call, seconds in (("pass", 1), ("report", 2), ("train", 4), ("report", 8)):
        match call:
            case "pass":
                progress.on_pass(lambda: model.training)
            case "train":
                model.training = True
            case _:
                progress.mark(call)
        clock.now += seconds
    assert progress.uses() == {"evaluation": 1 + 2 + 4, "training": 8}


@given(
    st.recursive(
        st.sampled_from([np.ones((2, 3)), np.float32(1)]),
        lambda inner: st.lists(inner, min_size=1) | st.dictionaries(st.text(), inner, min_size=1),
    )
)
def test_values_of_a_batch_are_those_of_its_arrays(batch: Any) -> None:
    def arrays(part: Any) -> list[Any]:
        if isinstance(part, (dict, list)):
            return [leaf for each in (part.values() if isinstance(part, dict) else part) for leaf in arrays(each)]
        return [part]

    rows, values = count_values(batch)
    assert values == sum(np.size(each) for each in arrays(batch))
    assert rows == len(np.atleast_1d(arrays(batch)[0]))
