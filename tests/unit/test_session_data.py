"""Data in a session: which rank gets which rows, and positions in the rank state of each checkpoint."""

from __future__ import annotations

import gc
import json
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raysgd
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import AttemptEnded, CheckpointError, ConfigError, SessionError
from raysgd.session import context, rank_state
from raysgd.session.base import Identity
from raysgd.session.event_queue import EventQueue
from raysgd.session.worker import Codec, WorkerSession


def same(value: Any) -> Any:
    return value


def numbers(num_rows: int = 10) -> dict[str, Any]:
    return {"x": np.arange(num_rows)}


def batches(dataset: Any, size: int = 2) -> list[list[int]]:
    return [batch["x"].tolist() for batch in dataset.get_split().iter_batches(size)]


def take(dataset: Any, steps: int, size: int = 2) -> Any:
    """Return an iterator that has taken ``steps`` batches; its epoch stays in progress while the iterator is referenced."""
    iterator = iter(dataset.get_split().iter_batches(size))
    for _ in range(steps):
        next(iterator)
    return iterator


class RecordingWriter:
    """A writer that records what it is given."""

    def __init__(self) -> None:
        self.small: list[dict[str, Any]] = []

    def save(self, call: int, state: Any, small: dict[str, Any], *, allow_pickle: bool, shared_by: int | None) -> None:
        self.small.append(json.loads(json.dumps(small)))

    def save_nothing(self, call: int, small: dict[str, Any]) -> None:
        self.small.append(json.loads(json.dumps(small)))


class CheckpointOf:
    """A checkpoint with this rank state."""

    def __init__(self, small: dict[str, Any]) -> None:
        self.small = small

    def load(self, rank: int, world_size: int, *, allow_pickle: bool, on_unusable: Any) -> tuple[Any, dict[str, Any]]:
        return "state", self.small


def session(
    given: Any = None, start: Any = None, rank: int = 0, world_size: int = 1
) -> tuple[WorkerSession, RecordingWriter]:
    writer = RecordingWriter()
    session_in_run = WorkerSession(
        Identity(rank, world_size),
        event_queue=EventQueue(0),
        writer=writer,  # type: ignore[arg-type]
        link=None,  # type: ignore[arg-type]
        codec=Codec(same, same),
        start=start,
        time_before_s=0.0,
        seed=None,
        deterministic=False,
        plan=resolve_datasets(given, same),
    )
    return session_in_run, writer


def save(session_in_run: WorkerSession) -> None:
    session_in_run.save_checkpoint("state", files=False, metrics=None, all_ranks=False, allow_pickle=False)


# -- in a worker -------------------------------------------------------------------------------------------------------


def test_each_rank_gets_its_shard() -> None:
    first, second = (session(numbers(), rank=rank, world_size=2)[0] for rank in range(2))
    rows_by_rank = [batches(session_of_rank.get_dataset(None)) for session_of_rank in (first, second)]
    assert rows_by_rank == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], []]]


def test_position_is_saved_with_the_generators() -> None:
    session_in_run, writer = session({"train": numbers(), "validation": numbers(4)})
    held = take(session_in_run.get_dataset("train"), 3)
    save(session_in_run)
    next(held)
    (small,) = writer.small
    assert small["data"]["train"]["consumed"] == 6
    assert small["data"]["validation"] == {"epoch": 0, "consumed": 0}
    assert set(small["generators"]) >= {"python", "numpy"}


def test_run_without_data_saves_no_position() -> None:
    session_in_run, writer = session()
    save(session_in_run)
    assert set(writer.small[0]) == {"generators"}


def test_loaded_checkpoint_resumes_at_its_position_on_any_rank() -> None:
    session_in_run, writer = session(numbers(12))
    held = take(session_in_run.get_dataset(None), 2)
    save(session_in_run)
    del held
    rows_by_rank = []
    for rank in range(2):
        small = rank_state.inherit({0: writer.small[0]}, rank, is_same_size=False)
        assert set(small) == {"data"}, "generators of another number of ranks"
        again, _ = session(numbers(12), CheckpointOf(small), rank, 2)
        assert again.load_checkpoint(None, allow_pickle=False) == "state"
        rows_by_rank.append(batches(again.get_dataset(None)))
    assert rows_by_rank == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


def test_checkpoint_without_position_leaves_the_position() -> None:
    session_in_run, _ = session(numbers(), CheckpointOf({}))
    held = take(session_in_run.get_dataset(None), 2)
    session_in_run.load_checkpoint(None, allow_pickle=False)
    assert [batch["x"].tolist() for batch in held] == [[4, 5], [6, 7], [8, 9]]


def test_position_in_another_dataset_is_refused_and_nothing_is_restored() -> None:
    session_in_run, writer = session(numbers(10))
    held = take(session_in_run.get_dataset(None), 2)
    save(session_in_run)
    del held
    other, _ = session(numbers(11), CheckpointOf(writer.small[0]))
    random.random()
    before = random.getstate()
    with pytest.raises(CheckpointError, match=r"of 10\), which has 11 rows now"):
        other.load_checkpoint(None, allow_pickle=False)
    assert random.getstate() == before


def test_next_batch_raises_after_the_attempt_ended() -> None:
    session_in_run, _ = session(numbers())
    held = take(session_in_run.get_dataset(None), 1)
    session_in_run.end("rank 1 died")
    with pytest.raises(AttemptEnded, match="rank 1 died"):
        next(held)
    for call in (lambda: session_in_run.get_dataset(None), session_in_run.get_datasets):
        with pytest.raises(AttemptEnded, match="rank 1 died"):
            call()


def test_thread_that_outlives_train_func_gets_no_more_data() -> None:
    session_in_run, _ = session(numbers())
    held = take(session_in_run.get_dataset(None), 1)
    session_in_run.close()
    with pytest.raises(SessionError, match="train_func has returned"):
        next(held)
    with pytest.raises(SessionError, match="train_func has returned"):
        session_in_run.get_dataset(None)


def test_unknown_dataset_name_is_refused_with_the_known_names() -> None:
    session_in_run, _ = session({"train": numbers(), "test": numbers()})
    with pytest.raises(
        ConfigError, match=r"no dataset 'trian' \(did you mean 'train'\?\): the run has 'train', 'test'"
    ):
        session_in_run.get_dataset("trian")
    with pytest.raises(ConfigError, match="needs the name of a dataset: the run has 'train', 'test'"):
        session_in_run.get_dataset(None)
    assert list(session_in_run.get_datasets()) == ["train", "test"]


def test_get_dataset_without_data_is_refused() -> None:
    session_in_run, _ = session()
    with pytest.raises(ConfigError, match=r"the run has no dataset: give one as run\(train_func, dataset=...\)"):
        session_in_run.get_dataset(None)
    assert session_in_run.get_datasets() == {}


# -- state that a rank restores ----------------------------------------------------------------------------------------

STATES = {
    0: {"generators": {"python": 0}, "data": {"train": {"epoch": 1, "consumed": 0}}},
    1: {"generators": {"python": 1}, "data": {"train": {"epoch": 1, "consumed": 0}}},
}


def test_equal_number_of_ranks_restores_each_ranks_state() -> None:
    assert [rank_state.inherit(STATES, rank, is_same_size=True) for rank in range(2)] == [STATES[0], STATES[1]]


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_other_number_of_ranks_restores_positions_only(rank: int) -> None:
    assert rank_state.inherit(STATES, rank, is_same_size=False) == {"data": STATES[0]["data"]}


def test_rank_without_saved_state_restores_the_positions_of_others() -> None:
    assert rank_state.inherit({1: STATES[1]}, 0, is_same_size=True) == {"data": STATES[1]["data"]}


def test_checkpoint_without_rank_states_restores_nothing() -> None:
    assert rank_state.inherit({}, 0, is_same_size=True) == {}


def own(consumed: int) -> dict[str, Any]:
    return {"data": {}, "data_of_rank": {"validation": {"epoch": 0, "consumed": consumed}}}


@pytest.mark.parametrize("is_same_size", [True, False])
def test_rank_restores_its_own_positions_and_a_new_rank_those_of_the_lowest(is_same_size: bool) -> None:
    states = {0: own(1), 1: {"data": {}}, 2: own(3)}
    found = [rank_state.inherit(states, rank, is_same_size=is_same_size) for rank in range(4)]
    assert found == [own(1), {"data": {}}, own(3), own(1)]


_CAPTURED = st.fixed_dictionaries(
    {"generators": st.integers(0, 3)},
    optional={"data": st.just({"train": {"epoch": 1}}), "data_of_rank": st.integers(0, 3).map(lambda at: {"x": at})},
)


@given(st.dictionaries(st.integers(0, 4), _CAPTURED), st.integers(0, 5), st.booleans())
def test_rank_needs_its_own_state_and_what_all_share(states: dict[int, Any], rank: int, is_same_size: bool) -> None:
    narrow = rank_state.shared_states(states) | ({rank: states[rank]} if rank in states else {})
    whole = rank_state.inherit(states, rank, is_same_size=is_same_size)
    assert rank_state.inherit(narrow, rank, is_same_size=is_same_size) == whole


def test_local_data_resumes_inside_a_whole_dataset(tmp_path: Path) -> None:
    with raysgd.local(dataset=numbers(4), dir=tmp_path):
        loop = iter(raysgd.get_dataset().get_split(whole=True).iter_batches(1))
        next(loop)
        raysgd.save_checkpoint({"step": 1})
    with raysgd.local(dataset=numbers(4), dir=tmp_path):
        raysgd.load_checkpoint()
        remaining = raysgd.get_dataset().get_split(whole=True).iter_batches(3)
        assert [batch["x"].tolist() for batch in remaining] == [[1, 2, 3]]


# -- in a world of one -------------------------------------------------------------------------------------------------


def test_local_data_without_a_trainer() -> None:
    with raysgd.local(dataset={"train": numbers(4), "validation": numbers(2)}):
        assert batches(raysgd.get_dataset("train")) == [[0, 1], [2, 3]]
        assert batches(raysgd.get_dataset("validation")) == [[0, 1]]
        assert list(raysgd.get_datasets()) == ["train", "validation"]
    with pytest.raises(ConfigError, match=r"raysgd.local\(dataset=...\)"):
        raysgd.get_dataset()


def test_local_data_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    with raysgd.local(dataset=numbers(), dir=tmp_path):
        held = take(raysgd.get_dataset(), 2)
        raysgd.save_checkpoint({"step": 2})
        next(held)
    with raysgd.local(dataset=numbers(), dir=tmp_path):
        assert raysgd.load_checkpoint() == {"step": 2}
        shard = raysgd.get_dataset().get_split()
        assert shard.epoch == 0
        assert batches(raysgd.get_dataset()) == [[4, 5], [6, 7], [8, 9]]
        assert shard.epoch == 1


def test_local_refuses_an_invalid_dataset() -> None:
    with pytest.raises(ConfigError, match=r"no file or folder rows\.parquet"), raysgd.local(dataset="rows.parquet"):
        pass
    assert raysgd.get_datasets() == {}, "a session was left behind"


# -- released memory ----------------------------------------------------------------------------------------------------


def test_rows_are_released_after_train_func() -> None:
    class Rows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

    rows = Rows()
    session_in_run, _ = session(rows)
    assert list(session_in_run.get_dataset(None).get_split().iter_rows()) == [0, 1, 2]
    held = weakref.ref(rows)
    del rows
    session_in_run.close()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("num_batches", [1, 2])
def test_epoch_ends_with_a_loop_that_a_framework_leaves_at_the_last_batch(num_batches: int) -> None:
    with raysgd.local(dataset=numbers(4)):
        loop = take(raysgd.get_dataset(), num_batches)
        context.acting().end_epochs(only_finished=True)
        assert raysgd.get_dataset().get_split().epoch == (1 if num_batches == 2 else 0)
        del loop
