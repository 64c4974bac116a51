"""Data in a session: who gets it and when, and its positions in the small state that goes with each checkpoint."""

from __future__ import annotations

import gc
import json
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.data import resolve_datasets
from raysgd.errors import AttemptEnded, CheckpointError, ConfigError, SessionError
from raysgd.session import rank_state
from raysgd.session.base import Identity
from raysgd.session.outbox import Outbox
from raysgd.session.worker import Codec, WorkerSession


def same(value: Any) -> Any:
    return value


def numbers(num_rows: int = 10) -> dict[str, Any]:
    return {"x": np.arange(num_rows)}


def batches(dataset: Any, size: int = 2) -> list[list[int]]:
    return [batch["x"].tolist() for batch in dataset.get_split().iter_batches(size)]


def take(dataset: Any, steps: int, size: int = 2) -> Any:
    """An iterator over batches that has taken so many steps, and stands inside its epoch as long as it is held."""
    iterator = iter(dataset.get_split().iter_batches(size))
    for _ in range(steps):
        next(iterator)
    return iterator


class Written:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.small: list[dict[str, Any]] = []

    def save(self, call: int, state: Any, small: dict[str, Any], *, trusted: bool, shared_by: int | None) -> None:
        self.small.append(json.loads(json.dumps(small)))

    def save_nothing(self, call: int, small: dict[str, Any]) -> None:
        self.small.append(json.loads(json.dumps(small)))


class From:
    """A checkpoint with this small state."""

    def __init__(self, small: dict[str, Any]) -> None:
        self.small = small

    def load(self, rank: int, world_size: int, *, trusted: bool, on_unusable: Any) -> tuple[Any, dict[str, Any]]:
        return "state", self.small


def session(given: Any = None, start: Any = None, rank: int = 0, world_size: int = 1) -> tuple[WorkerSession, Written]:
    written = Written()
    made = WorkerSession(
        Identity(rank, world_size),
        outbox=Outbox(0),
        writer=written,  # type: ignore[arg-type]
        link=None,  # type: ignore[arg-type]
        codec=Codec(same, same),
        start=start,
        load_path=lambda *_: None,
        time_before_s=0.0,
        seed=None,
        deterministic=False,
        plan=resolve_datasets(given, same),
    )
    return made, written


def save(made: WorkerSession) -> None:
    made.save_checkpoint("state", files=False, metrics=None, all_ranks=False, trusted=False)


# -- in a worker -------------------------------------------------------------------------------------------------------


def test_each_rank_gets_its_share() -> None:
    first, second = (session(numbers(), rank=rank, world_size=2)[0] for rank in range(2))
    shares = [batches(one.get_dataset(None)) for one in (first, second)]
    assert shares == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], []]]


def test_the_position_is_saved_beside_the_generators() -> None:
    made, written = session({"train": numbers(), "validation": numbers(4)})
    held = take(made.get_dataset("train"), 3)
    save(made)
    next(held)
    (small,) = written.small
    assert small["data"]["train"]["consumed"] == 6
    assert small["data"]["validation"] == {"epoch": 0, "consumed": 0}
    assert set(small["generators"]) >= {"python", "numpy"}


def test_a_run_without_data_saves_no_position() -> None:
    made, written = session()
    save(made)
    assert set(written.small[0]) == {"generators"}


def test_a_loaded_checkpoint_goes_on_where_it_was_saved_with_other_ranks_too() -> None:
    made, written = session(numbers(12))
    held = take(made.get_dataset(None), 2)
    save(made)
    del held
    shares = []
    for rank in range(2):
        small = rank_state.inherit({0: written.small[0]}, rank, is_same_size=False)
        assert set(small) == {"data"}, "generators of another number of ranks"
        again, _ = session(numbers(12), From(small), rank, 2)
        assert again.load_checkpoint(None, trusted=False) == "state"
        shares.append(batches(again.get_dataset(None)))
    assert shares == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


def test_a_state_without_a_position_moves_nothing() -> None:
    made, _ = session(numbers(), From({}))
    held = take(made.get_dataset(None), 2)
    made.load_checkpoint(None, trusted=False)
    assert [batch["x"].tolist() for batch in held] == [[4, 5], [6, 7], [8, 9]]


def test_a_position_in_other_data_is_refused_and_nothing_is_restored() -> None:
    made, written = session(numbers(10))
    held = take(made.get_dataset(None), 2)
    save(made)
    del held
    other, _ = session(numbers(11), From(written.small[0]))
    random.random()
    before = random.getstate()
    with pytest.raises(CheckpointError, match=r"of 10\), which has 11 rows now"):
        other.load_checkpoint(None, trusted=False)
    assert random.getstate() == before


def test_the_next_batch_raises_once_the_attempt_is_over() -> None:
    made, _ = session(numbers())
    held = take(made.get_dataset(None), 1)
    made.end("rank 1 died")
    with pytest.raises(AttemptEnded, match="rank 1 died"):
        next(held)
    for call in (lambda: made.get_dataset(None), made.get_datasets):
        with pytest.raises(AttemptEnded, match="rank 1 died"):
            call()


def test_a_thread_that_outlived_train_func_gets_no_more_data() -> None:
    made, _ = session(numbers())
    held = take(made.get_dataset(None), 1)
    made.close()
    with pytest.raises(SessionError, match="train_func has returned"):
        next(held)
    with pytest.raises(SessionError, match="train_func has returned"):
        made.get_dataset(None)


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    made, _ = session({"train": numbers(), "test": numbers()})
    with pytest.raises(ConfigError, match=r"no dataset 'trian' \(did you mean 'train'\?\); there are 'train', 'test'"):
        made.get_dataset("trian")
    with pytest.raises(ConfigError, match="without a name, but there are 'train', 'test'"):
        made.get_dataset(None)
    assert list(made.get_datasets()) == ["train", "test"]


def test_without_data_there_is_none_to_get() -> None:
    made, _ = session()
    with pytest.raises(ConfigError, match=r"no dataset was given; give one: run\(train_func, dataset=...\)"):
        made.get_dataset(None)
    assert made.get_datasets() == {}


# -- what a rank goes on from ------------------------------------------------------------------------------------------

STATES = {
    0: {"generators": {"python": 0}, "data": {"train": {"epoch": 1, "consumed": 0}}},
    1: {"generators": {"python": 1}, "data": {"train": {"epoch": 1, "consumed": 0}}},
}


def test_as_many_ranks_inherit_each_its_own() -> None:
    assert [rank_state.inherit(STATES, rank, is_same_size=True) for rank in range(2)] == [STATES[0], STATES[1]]


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_another_number_of_ranks_inherits_the_positions_alone(rank: int) -> None:
    assert rank_state.inherit(STATES, rank, is_same_size=False) == {"data": STATES[0]["data"]}


def test_a_rank_that_had_returned_inherits_the_positions_of_the_others() -> None:
    assert rank_state.inherit({1: STATES[1]}, 0, is_same_size=True) == {"data": STATES[1]["data"]}


def test_a_checkpoint_without_ranks_states_leaves_nothing() -> None:
    assert rank_state.inherit({}, 0, is_same_size=True) == {}


# -- in a world of one -------------------------------------------------------------------------------------------------


def test_local_data_without_a_trainer() -> None:
    with raysgd.local(dataset={"train": numbers(4), "validation": numbers(2)}):
        assert batches(raysgd.get_dataset("train")) == [[0, 1], [2, 3]]
        assert batches(raysgd.get_dataset("validation")) == [[0, 1]]
        assert list(raysgd.get_datasets()) == ["train", "validation"]
    with pytest.raises(ConfigError, match=r"raysgd.local\(dataset=...\)"):
        raysgd.get_dataset()


def test_local_data_goes_on_where_its_checkpoint_was_taken(tmp_path: Path) -> None:
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


def test_local_refuses_what_is_no_dataset() -> None:
    with pytest.raises(ConfigError, match=r"no file or folder rows\.parquet"), raysgd.local(dataset="rows.parquet"):
        pass
    assert raysgd.get_datasets() == {}, "a session was left behind"


# -- what is held ------------------------------------------------------------------------------------------------------


def test_after_train_func_nothing_refers_to_the_rows() -> None:
    class Rows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

    rows = Rows()
    made, _ = session(rows)
    assert list(made.get_dataset(None).get_split().iter_rows()) == [0, 1, 2]
    held = weakref.ref(rows)
    del rows
    made.close()
    gc.collect()
    assert held() is None
