"""Lazy `ray.data.Dataset`s in runs: executed while workers read them, each row once through deaths, in bounded memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray

import raysgd
from raysgd.config import ScalingConfig
from raysgd.controller.processes.data_holder import DataHolder, Kept
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.order import stream_order
from raysgd.errors import ConfigError, DataError
from raysgd.testing import FaultPlan, Kill, KillProcess, StopProcess
from raysgd.trainer.arguments import resolve_data
from raysgd.workers.liveness.watched import watched_actor
from support.poll import until
from support.runs import PATIENCE_S, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)

RAY_INIT = {"num_cpus": 6, "object_store_memory": 200 * 2**20}
NUM_ROWS = 1_000
EPOCHS = 2


def lazy(num_rows: int = NUM_ROWS, num_blocks: int = 20) -> Any:
    return ray.data.range(num_rows, override_num_blocks=num_blocks).map_batches(_with_square)


def _with_square(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "square": batch["id"] ** 2, "pair": np.stack([batch["id"], -batch["id"]], 1)}


def small_stretches() -> None:
    """Shorten the stretches, so that a dataset of a few kilobytes has several groups."""
    stream_order.MIN_STRETCH_BYTES = 16


def read(config: dict[str, Any]) -> list[list[int]]:
    small_stretches()
    shard = raysgd.get_dataset().get_split()
    batches = shard.to_torch(7, shuffle=config.get("shuffle", False))
    found = []
    for _ in range(config.get("epochs", 1)):
        rows = []
        for batch in batches:
            assert (batch["square"] == batch["id"] ** 2).all()
            assert (batch["pair"][:, 1] == -batch["id"]).all()
            rows += batch["id"].tolist()
        found.append(rows)
        raysgd.report(rows=len(rows))
    return found


@pytest.mark.parametrize("shuffle", [False, "window"])
def test_workers_read_each_row_of_a_lazy_dataset_once_per_epoch(trainer: raysgd.Trainer, shuffle: Any) -> None:
    config = {"epochs": EPOCHS, "shuffle": shuffle}
    stream = trainer.run_generator(read, config, dataset=lazy(), callbacks=quiet(), returns="all")
    results = list(stream)
    first, second = stream.get_returns()
    for epoch in range(EPOCHS):
        assert sorted(first[epoch] + second[epoch]) == list(range(NUM_ROWS))
        assert abs(len(first[epoch]) - len(second[epoch])) <= 7
    assert (first[0] == sorted(first[0])) == (shuffle is False)
    assert (first[0] == first[1]) == (shuffle is False)
    assert all(0 <= result["data_wait_fraction"] <= 1 for result in results)


def frames(num_rows: int) -> Any:
    return ray.data.range(num_rows, override_num_blocks=4).map_batches(_as_frame, batch_format="pandas")


def _as_frame(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"id": frame["id"], "name": [f"row {number}" for number in frame["id"]]})


def names(config: dict[str, Any]) -> list[str]:
    shard = raysgd.get_dataset().get_split()
    return [name for table in shard.iter_batches(8, format="pyarrow") for name in table["name"].to_pylist()]


def test_pandas_blocks_and_string_columns_are_read(trainer: raysgd.Trainer) -> None:
    first, second = trainer.run(names, dataset=frames(50), callbacks=quiet(), returns="all")
    assert sorted(first + second) == sorted(f"row {number}" for number in range(50))


def shape_of(config: dict[str, Any]) -> Any:
    data = raysgd.get_dataset()
    batch = data.get_split().first_batch(3)
    return data.schema.names, data.num_rows, batch["id"].tolist(), sum(1 for _ in data.get_split().iter_rows())


def test_lazy_dataset_has_a_schema_and_no_length(trainer: raysgd.Trainer) -> None:
    first, second = trainer.run(shape_of, dataset=lazy(11, 2), callbacks=quiet(), returns="all")
    assert first == (["id", "square", "pair"], None, [0, 1, 2], 6)
    assert second[3] == 5


def test_filtered_sorted_and_empty_lazy_datasets_are_read(trainer: raysgd.Trainer) -> None:
    some = lazy().filter(_is_small)
    first, second = trainer.run(read, dataset=some, callbacks=quiet(), returns="all")
    assert sorted(first[0] + second[0]) == list(range(33))
    none = ray.data.range(20).map_batches(_with_square).filter(_is_negative)
    assert trainer.run(read, dataset=none, callbacks=quiet(), returns="all") == [[[]], [[]]]


def _is_small(row: dict[str, Any]) -> bool:
    return bool(row["id"] < 33)


def _is_negative(row: dict[str, Any]) -> bool:
    return bool(row["id"] < 0)


def _fail_at_500(batch: dict[str, Any]) -> dict[str, Any]:
    if 500 in batch["id"]:
        raise ValueError("row 500 is bad")
    return _with_square(batch)


def test_exception_of_a_transformation_is_raised(trainer: raysgd.Trainer) -> None:
    bad = ray.data.range(NUM_ROWS, override_num_blocks=20).map_batches(_fail_at_500)
    with pytest.raises(DataError, match="row 500 is bad"):
        trainer.run(read, dataset=bad, callbacks=quiet())
    assert len(trainer.run(read, dataset=lazy(), callbacks=quiet())[0]) > 0


def test_workers_that_leave_no_cpu_for_ray_data_are_refused(ray_cluster: Any, tmp_path: Path) -> None:
    with (
        make_trainer(tmp_path, 6) as trainer,
        pytest.raises(ConfigError, match=r"6 workers of 1 CPUs take 6 of the 6 that the cluster has"),
    ):
        trainer.run(read, dataset=lazy(), callbacks=quiet())


def test_execution_without_a_cpu_warns_and_continues_once_one_is_free(
    trainer: raysgd.Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.run(lambda: None, callbacks=quiet())  # starts the two workers
    output = ""

    def has_warned() -> bool:
        nonlocal output
        output += "".join(capsys.readouterr())
        return "has waited 20 s for a CPU: all 6 of the cluster are in use" in output

    with raysgd.Trainer(1, "none", cpus_per_worker=4, run_config=raysgd.RunConfig(storage_path=tmp_path)) as other:
        other.run(lambda: None, callbacks=quiet())
        stream = trainer.run_generator(read, {}, dataset=lazy(), callbacks=quiet(), returns="all")
        assert until(has_warned, PATIENCE_S), output
    assert sorted(chain(*(rows for (rows,) in stream.get_returns()))) == list(range(NUM_ROWS))


def test_lazy_dataset_is_read_without_a_trainer(ray_cluster: Any) -> None:
    with raysgd.local(dataset=lazy(30, 3)):
        assert read({}) == [list(range(30))]


# -- failures and memory -----------------------------------------------------------------------------------------------


def logged(config: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """Read an epoch; save the rows that all ranks have seen in each step, and return them."""
    small_stretches()
    state = raysgd.load_checkpoint() or {"seen": []}
    seen = list(state["seen"])
    batches = raysgd.get_dataset().get_split().to_torch(10, shuffle="window")
    epoch = batches.epoch
    for step, batch in enumerate(batches):
        mine = [(epoch, row) for row in batch["id"].tolist()]
        everyones = [mine]
        if raysgd.world_size() > 1:
            import torch.distributed as dist

            everyones = [[] for _ in range(raysgd.world_size())]
            dist.all_gather_object(everyones, mine)
        seen += list(chain.from_iterable(everyones))
        raysgd.save_checkpoint({"seen": seen})
        raysgd.report(step=step, pid=os.getpid(), rows=len(seen))
        time.sleep(0.02)
    return {"seen": seen}


FAULTS = {
    "worker": Kill(rank=1, step=20),
    "host": KillProcess(process="stream actor", step=20),
    "stopped host": StopProcess(process="stream actor", step=20),
}


@pytest.mark.fault
@pytest.mark.parametrize("victim", FAULTS)
def test_each_row_comes_once_when_a_process_dies(ray_cluster: Any, tmp_path: Path, victim: str) -> None:
    plan = FaultPlan([FAULTS[victim]])
    failure = raysgd.FailureConfig(max_failures=3, heartbeat_timeout_s=3)
    with make_trainer(tmp_path, 2, "torch", failure_config=failure) as trainer:
        stream = trainer.run_generator(plan.wrap(logged), dataset=lazy(), callbacks=quiet())
        attempts = {result["attempt"] for result in stream}
        seen = stream.get_returns()["seen"]
    plan.assert_all_fired()
    assert Counter(row for _, row in seen) == Counter(range(NUM_ROWS))
    assert attempts == ({1, 2} if victim == "worker" else {1})


def _hosts() -> set[int]:
    """Return the process ids of actors that execute datasets."""
    import psutil

    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if "".join(process.info["cmdline"] or []).startswith("ray::StreamActor"):
            found.add(process.pid)
    return found


def _large(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "x": np.zeros((len(batch["id"]), 2**18), np.float32)}  # 1 MB a row


def count_large(config: dict[str, Any]) -> int:
    stream_order.MIN_STRETCH_BYTES, stream_order.MAX_STRETCH_BYTES = 2**20, 4 * 2**20
    return sum(len(batch["id"]) for batch in raysgd.get_dataset().get_split().to_torch(2))


def test_dataset_larger_than_the_object_store_is_streamed(trainer: raysgd.Trainer) -> None:
    """Stream 600 MB through an object store of 200 MB; nothing may be spilled to disk."""
    large = ray.data.range(600, override_num_blocks=150).map_batches(_large)
    first, second = trainer.run(count_large, dataset=large, callbacks=quiet(), returns="all")
    assert first + second == 600
    assert _spilled_bytes() == 0


def _spilled_bytes() -> int:
    from ray._private.internal_api import memory_summary

    lines = [
        line
        for line in memory_summary(ray.get_runtime_context().gcs_address, stats_only=True).splitlines()
        if line.startswith("Spilled")
    ]
    return sum(int(line.split()[1]) for line in lines)


def test_stream_host_and_blocks_are_removed_with_the_run(trainer: raysgd.Trainer) -> None:
    trainer.run(read, dataset=lazy(), callbacks=quiet())
    assert until(lambda: not _hosts(), PATIENCE_S) or not _hosts()


def test_lazy_dataset_and_table_are_read_in_one_run(trainer: raysgd.Trainer) -> None:
    given = {"train": lazy(40, 4), "validation": pa.table({"x": [1, 2, 3]})}
    first, second = trainer.run(both, dataset=given, callbacks=quiet(), returns="all")
    assert sorted(first[0] + second[0]) == list(range(40)) and sorted(first[1] + second[1]) == [1, 2, 3]


def both(config: dict[str, Any]) -> tuple[list[int], list[int]]:
    data = raysgd.get_datasets()
    train = [row["id"] for row in data["train"].get_split().iter_rows()]
    return train, [row["x"] for row in data["validation"].get_split().iter_rows()]


class FakeTrainerActor:
    """A double of a TrainerActor that stays alive."""

    def wait_for_end(self) -> None:
        time.sleep(3600)


def test_detached_run_executes_a_lazy_dataset_without_its_driver(ray_cluster: Any) -> None:
    controller = ray.remote(FakeTrainerActor).options(num_cpus=0).remote()
    data_holder: Any = watched_actor(DataHolder).options(num_cpus=0).remote(controller)
    try:
        given = resolve_data(lazy(50, 5), ScalingConfig(num_workers=1))
        first = given.sources["dataset"].blocks[0].host
        kept = ray.get(data_holder.keep.remote(Kept(given))).datasets
        ray.kill(first)
        shard = WorkerDatasets(kept, 0, 1, 0, fetch=ray.get).get().get_split()
        assert sorted(row["id"] for row in shard.iter_rows()) == list(range(50))
        of_the_driver = ray.data.from_items([{"id": 1}]).map_batches(_with_square)
        with pytest.raises(ConfigError, match="rows that the driver holds"):
            ray.get(data_holder.keep.remote(Kept(resolve_data(of_the_driver, ScalingConfig(num_workers=1)))))
    finally:
        ray.kill(data_holder)
        ray.kill(controller)


def test_lazy_dataset_of_several_folds_is_executed_once_for_all_runs_of_a_plan(ray_cluster: Any) -> None:
    train, scaling = lazy(50, 5), ScalingConfig(num_workers=1)
    plan = resolve_data(((train, lazy(10, 2)), (train, lazy(10, 2))), scaling)
    hosts = [source.blocks[0] for source in plan.sources.values()]
    assert plan.folds is not None and len(plan.folds) == 2
    assert len({id(host) for host in hosts}) == 3
    assert resolve_data(plan, scaling) is plan
