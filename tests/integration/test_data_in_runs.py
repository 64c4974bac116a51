"""Datasets given to a run: what the workers read, the position in checkpoints, and when the rows are freed."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import ray

import raysgd
from raysgd.errors import CheckpointError, ConfigError, DataError, SerializationError
from support.poll import until
from support.runs import PATIENCE_S, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)

NUM_ROWS = 10


class Squares:
    """A map-style dataset: items without columns."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < NUM_ROWS:
            raise IndexError(index)
        return index


def numbers(num_rows: int = NUM_ROWS, first: int = 0) -> dict[str, Any]:
    return {"x": np.arange(first, first + num_rows)}


def ray_dataset() -> Any:
    return ray.data.from_items([{"x": index} for index in range(NUM_ROWS)], override_num_blocks=3)


def torch_dataset() -> Any:
    import torch

    return torch.utils.data.TensorDataset(torch.arange(NUM_ROWS))


def value_of(row: Any) -> int:
    """Return the number in a row of any of these datasets."""
    if isinstance(row, dict):
        row = row["x"]
    return int(row[0] if isinstance(row, tuple) else row)


def rows_of_this_rank(config: dict[str, Any]) -> list[int]:
    return [value_of(row) for row in raysgd.get_dataset(config.get("name")).get_split().iter_rows()]


def read_and_save(config: dict[str, Any]) -> dict[str, Any]:
    """Read two rows a step and save after each step; leave the loop after ``config["stop_after"]`` steps, if given."""
    state = raysgd.load_checkpoint()
    seen: list[int] = []
    batches = raysgd.get_dataset().get_split().iter_batches(2, shuffle=config.get("shuffle", False))
    epoch = batches.epoch
    for step, batch in enumerate(batches, 1):
        seen += batch["x"].tolist()
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
        if step == config.get("stop_after"):
            return {"state": state, "epoch": epoch, "seen": seen}
    return {"state": state, "epoch": epoch, "seen": seen, "next": batches.epoch}


def seen_by(returned: list[dict[str, Any]]) -> list[int]:
    return sorted(row for of_rank in returned for row in of_rank["seen"])


def last_of(trainer: raysgd.Trainer) -> raysgd.Checkpoint:
    checkpoint = trainer.get_last_checkpoint()
    assert checkpoint is not None
    return checkpoint


def validates(config: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Read rows of the whole validation dataset, a number of them that differs by rank, and save; return what was read."""
    raysgd.load_checkpoint()
    train = [row["x"] for row in raysgd.get_dataset("train").get_split().iter_rows()]
    batches = iter(raysgd.get_dataset("validation").get_split(whole=True).iter_batches(1))
    seen = [int(batch["x"][0]) for _, batch in zip(range(config["steps"][raysgd.world_rank()]), batches, strict=False)]
    raysgd.save_checkpoint({"step": 1})
    return [int(x) for x in train], seen


def test_every_worker_reads_a_whole_dataset_and_resumes_inside(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    data = {"train": numbers(4), "validation": numbers(6, first=10)}
    returned = trainer.run(validates, {"steps": [1, 4]}, dataset=data, callbacks=quiet(), returns="all")
    assert returned == [([0, 2], [10]), ([1, 3], [10, 11, 12, 13])]
    checkpoint = last_of(trainer)
    again = {"dataset": data, "resume_from": checkpoint, "callbacks": quiet(), "returns": "all"}
    returned = trainer.run(validates, {"steps": [9, 9]}, **again)
    assert [seen for _, seen in returned] == [[11, 12, 13, 14, 15], [14, 15]]
    with make_trainer(tmp_path, 3) as larger:
        returned = larger.run(validates, {"steps": [9, 9, 9]}, **again)
        assert [seen for _, seen in returned] == [[11, 12, 13, 14, 15], [14, 15], [11, 12, 13, 14, 15]]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        numbers,
        lambda: pd.DataFrame(numbers()),
        lambda: pa.table(numbers()),
        lambda: [{"x": index} for index in range(NUM_ROWS)],
        ray_dataset,
        torch_dataset,
        Squares,
    ],
    ids=["numpy", "pandas", "pyarrow", "rows", "ray", "torch", "map-style"],
)
def test_each_row_comes_once_for_every_kind_of_dataset(trainer: raysgd.Trainer, make: Any) -> None:
    first, second = trainer.run(rows_of_this_rank, {}, dataset=make(), callbacks=quiet(), returns="all")
    assert (first, second) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])


def test_workers_read_each_row_of_files_once(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    for number in range(5):
        pq.write_table(pa.table(numbers(2, 2 * number)), tmp_path / f"{number}.parquet")
    for given in (tmp_path, str(tmp_path), pyarrow.dataset.dataset(tmp_path)):
        returned = trainer.run(rows_of_this_rank, {}, dataset=given, callbacks=quiet(), returns="all")
        assert returned == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_run_over_files_resumes_inside_an_epoch_with_another_number_of_workers(
    trainer: raysgd.Trainer, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table(numbers(23)), folder / "a.parquet", row_group_size=4)
    config = {"shuffle": "window"}
    given = {"dataset": folder, "callbacks": quiet(), "returns": "all"}
    first = trainer.run(read_and_save, config | {"stop_after": 3}, **given)
    checkpoint = last_of(trainer)
    for num_workers in (1, 3):
        with make_trainer(tmp_path / "runs", num_workers) as other:
            second = other.run(read_and_save, config, resume_from=checkpoint, **given)
        assert sorted(seen_by(first) + seen_by(second)) == list(range(23))


def test_vanished_file_ends_the_run_and_is_named(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    pq.write_table(pa.table(numbers()), tmp_path / "gone.parquet")
    config = {"file": str(tmp_path / "gone.parquet")}

    def train_func(config: dict[str, Any]) -> None:
        if raysgd.world_rank() == 0:
            os.unlink(config["file"])
        raysgd.barrier()
        rows_of_this_rank({})

    with pytest.raises(DataError, match=r"gone\.parquet cannot be read"):
        trainer.run(train_func, config, dataset=config["file"], callbacks=quiet())


def test_last_step_of_tensors_is_empty_on_some_ranks(trainer: raysgd.Trainer) -> None:
    def train_func() -> list[list[int]]:
        shard = raysgd.get_dataset().get_split()
        return [batch["x"].tolist() for batch in shard.to_torch(batch_size=4)]

    returned = trainer.run(train_func, dataset=numbers(), callbacks=quiet(), returns="all")
    assert returned == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], []]]


def test_second_run_reads_its_own_dataset(trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> Any:
        return rows_of_this_rank(config), raysgd.get_dataset().num_rows

    for first in (0, 100, 200):
        returned = trainer.run(train_func, {}, dataset=numbers(4, first), callbacks=quiet(), returns="all")
        assert returned == [([first, first + 2], 4), ([first + 1, first + 3], 4)]


def test_several_datasets_are_read_by_name(trainer: raysgd.Trainer) -> None:
    def train_func() -> Any:
        datasets = raysgd.get_datasets()
        assert raysgd.get_dataset("train") is datasets["train"]  # type: ignore[call-overload]
        return {name: [value_of(row) for row in raysgd.get_dataset(name).get_split().iter_rows()] for name in datasets}

    given = {"train": numbers(4), "validation": pd.DataFrame(numbers(2, 50))}
    returned = trainer.run(train_func, dataset=given, callbacks=quiet(), returns="all")
    assert returned == [{"train": [0, 2], "validation": [50]}, {"train": [1, 3], "validation": [51]}]


def test_get_datasets_returns_folds_in_the_structure_given(trainer: raysgd.Trainer) -> None:
    def train_func() -> Any:
        return [[part.num_rows for part in fold] for fold in raysgd.get_datasets()]

    folds = ((numbers(6), numbers(4)), (numbers(7), numbers(3)))
    assert trainer.run(train_func, dataset=folds, callbacks=quiet()) == [[6, 4], [7, 3]]


def test_seed_selects_the_order_of_rows(ray_cluster: Any, tmp_path: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        with make_trainer(tmp_path, 1, seed=seed) as trainer:
            returned = trainer.run(read_and_save, {"shuffle": "full"}, dataset=numbers(100), callbacks=quiet())
            orders.append(returned["seen"])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(100))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_get_dataset_without_data_says_how_to_give_one(trainer: raysgd.Trainer) -> None:
    with pytest.raises(ConfigError, match=r"the run has no dataset: give one as run\(train_func, dataset=...\)"):
        trainer.run(rows_of_this_rank, {}, callbacks=quiet())
    assert trainer.run(lambda: raysgd.get_datasets(), callbacks=quiet()) == {}


def test_unknown_dataset_name_is_refused_with_the_known_names(trainer: raysgd.Trainer) -> None:
    given = {"train": numbers(), "test": numbers()}
    with pytest.raises(ConfigError, match=r"no dataset 'trian'.*the run has 'train', 'test'"):
        trainer.run(rows_of_this_rank, {"name": "trian"}, dataset=given, callbacks=quiet())


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ("rows.parquet", ConfigError, "no file or folder"),
        (iter([1]), ConfigError, "which raysgd cannot read"),
        (np.arange(3), ConfigError, "a column without a name"),
    ],
)
def test_invalid_dataset_starts_no_run(
    trainer: raysgd.Trainer, dataset: Any, error: type[Exception], message: str
) -> None:
    trainer.run(lambda: None, callbacks=quiet())
    before = trainer.run_dir
    with pytest.raises(error, match=message):
        trainer.run(rows_of_this_rank, {}, dataset=dataset, callbacks=quiet())
    assert trainer.run_dir == before


def test_dataset_that_cannot_be_pickled_is_named(trainer: raysgd.Trainer) -> None:
    unfit = Squares()
    unfit.lines = (line for line in "abc")  # type: ignore[attr-defined]
    with pytest.raises(SerializationError, match="dataset 'train', a Squares, cannot be sent to the workers"):
        trainer.run(rows_of_this_rank, {}, dataset={"train": unfit}, callbacks=quiet())


def test_save_with_ranks_at_different_positions_is_refused(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        batches = iter(raysgd.get_dataset().get_split().iter_batches(1))
        for _ in range(1 + raysgd.world_rank()):
            next(batches)
        raysgd.save_checkpoint({"step": 1})
        raysgd.barrier()

    with pytest.raises(CheckpointError, match=r"different positions in dataset 'dataset'.*equally many batches"):
        trainer.run(train_func, dataset=numbers(), callbacks=quiet())
    assert trainer.get_last_checkpoint() is None


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_run_resumes_inside_an_epoch(trainer: raysgd.Trainer) -> None:
    data = numbers(22)
    first = trainer.run(
        read_and_save, {"shuffle": "full", "stop_after": 2}, dataset=data, callbacks=quiet(), returns="all"
    )
    checkpoint = last_of(trainer)
    second = trainer.run(
        read_and_save, {"shuffle": "full"}, dataset=data, resume_from=checkpoint, callbacks=quiet(), returns="all"
    )
    assert [one["state"] for one in second] == [{"step": 2}] * 2
    assert len(seen_by(first)) == 8
    assert sorted(seen_by(first) + seen_by(second)) == list(range(22)), "a row came twice, or never"
    assert [(one["epoch"], one["next"]) for one in second] == [(0, 1)] * 2


def test_other_numbers_of_workers_resume_at_the_same_position(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    data = numbers(23)
    first = trainer.run(
        read_and_save, {"shuffle": "window", "stop_after": 3}, dataset=data, callbacks=quiet(), returns="all"
    )
    checkpoint = last_of(trainer)
    for num_workers in (1, 3):
        with make_trainer(tmp_path, num_workers) as other:
            second = other.run(
                read_and_save,
                {"shuffle": "window"},
                dataset=data,
                resume_from=checkpoint,
                callbacks=quiet(),
                returns="all",
            )
        assert sorted(seen_by(first) + seen_by(second)) == list(range(23))


def test_checkpoint_of_the_last_step_resumes_with_an_empty_remainder(trainer: raysgd.Trainer) -> None:
    trainer.run(read_and_save, {}, dataset=numbers(8), callbacks=quiet())
    again = trainer.run(read_and_save, {}, dataset=numbers(8), resume_from=last_of(trainer), callbacks=quiet())
    assert (again["seen"], again["epoch"], again["next"]) == ([], 0, 1)


def test_checkpoint_inside_another_dataset_is_refused(trainer: raysgd.Trainer) -> None:
    trainer.run(read_and_save, {"stop_after": 1}, dataset=numbers(8), callbacks=quiet())
    checkpoint = last_of(trainer)
    with pytest.raises(CheckpointError, match=r"in the middle of dataset 'dataset' .* has 9 rows now"):
        trainer.run(read_and_save, {}, dataset=numbers(9), resume_from=checkpoint, callbacks=quiet())
    from_state = trainer.run(
        read_and_save, {}, dataset=numbers(9), resume_from=checkpoint.load(), callbacks=quiet(), returns="all"
    )
    assert (from_state[0]["state"], seen_by(from_state)) == ({"step": 1}, list(range(9)))


def test_checkpoint_resumes_without_a_trainer(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    first = trainer.run(read_and_save, {"stop_after": 1}, dataset=numbers(), callbacks=quiet(), returns="all")
    folder = Path(last_of(trainer).path or "").parent
    with raysgd.local(dataset=numbers(), dir=folder):
        second = read_and_save({})
    assert sorted(seen_by(first) + second["seen"]) == list(range(NUM_ROWS))


def test_ray_dataset_is_read_without_a_trainer(ray_cluster: Any) -> None:
    with raysgd.local(dataset=ray_dataset()):
        assert rows_of_this_rank({}) == list(range(NUM_ROWS))


# -- end of a run ------------------------------------------------------------------------------------------------------


def test_cancelled_run_leaves_its_loop_at_the_next_batch(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        try:
            for _ in range(10_000):
                for _ in raysgd.get_dataset().get_split().iter_batches(1):
                    time.sleep(0.005)
                    Path(config["folder"], "reading").touch()
        except BaseException as error:
            Path(config["folder"], f"{type(error).__name__}-{raysgd.world_rank()}").touch()
            raise

    stream = trainer.run_generator(train_func, {"folder": str(tmp_path)}, dataset=numbers(), callbacks=quiet())
    assert until((tmp_path / "reading").exists, PATIENCE_S)
    stream.cancel()
    assert until(lambda: len(list(tmp_path.glob("AttemptEnded-*"))) == 2, PATIENCE_S)
    trainer.get_last_checkpoint()  # waits until the run is closed


def plasma_bytes() -> int:
    """Return the bytes in use in the node's object store."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return int(total["object_store_memory"] - free["object_store_memory"])


BIG_ROWS = 4_000_000


def fail_at_the_end(config: dict[str, Any]) -> int:
    """Read the dataset after the driver has released it."""
    deadline = time.monotonic() + 60
    while not Path(config["go"]).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    num_rows = sum(len(batch["x"]) for batch in raysgd.get_dataset().get_split().iter_batches(100_000))
    if config["fails"]:
        raise ValueError(f"read {num_rows} rows")
    return num_rows


@pytest.mark.parametrize("fails", [False, True])
def test_data_is_freed_when_its_run_ends(trainer: raysgd.Trainer, tmp_path: Path, fails: bool) -> None:
    go = tmp_path / "go"
    data: Any = {"x": np.zeros(BIG_ROWS)}
    config = {"go": str(go), "fails": fails}
    stream = trainer.run_generator(fail_at_the_end, config, dataset=data, callbacks=quiet(), returns="all")
    del data
    gc.collect()
    assert until(lambda: plasma_bytes() >= 8 * BIG_ROWS, PATIENCE_S)  # Ray reports the usage with a delay
    go.touch()
    if fails:
        with pytest.raises(ValueError, match="read 2000000 rows"):
            stream.get_returns()
    else:
        assert stream.get_returns() == [BIG_ROWS // 2] * 2
    assert until(lambda: plasma_bytes() < 8 * BIG_ROWS, PATIENCE_S), "the data outlived its run"
