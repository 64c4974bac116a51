"""Datasets in Ray's object store: `ray.data.Dataset`s, and a plan that is passed to a task."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raysgd.data.cross_validation import to_cv
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.plan import DatasetPlan
from raysgd.data.sources.resolve import resolve_datasets

RAY_INIT = {"num_cpus": 2}


@pytest.fixture(autouse=True)
def _cluster(ray_cluster: Any) -> None:
    """Start a cluster for all tests of this module."""


def read(given: Any) -> dict[str, list[Any]]:
    """Return all rows as a task reads them from the plan."""
    import ray

    @ray.remote
    def batches(plan: DatasetPlan) -> list[Any]:
        shard = WorkerDatasets(plan, 0, 1, 0, fetch=ray.get).get().get_split()
        return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in shard.to_torch(7)]

    found: list[dict[str, list[Any]]] = ray.get(batches.remote(resolve_datasets(given, ray.put)))
    return {name: [value for batch in found for value in batch[name]] for name in found[0]}


def _in_order(dataset: Any) -> Any:
    """Materialize a dataset with its rows in order, which Ray Data keeps only on request."""
    options = dataset.context.execution_options
    options.preserve_order = True
    try:
        return dataset.materialize()
    finally:
        options.preserve_order = False


def add_columns(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "square": batch["id"] ** 2, "pair": np.stack([batch["id"], -batch["id"]], 1)}


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_transformed_dataset_keeps_its_order(is_lazy: bool) -> None:
    import ray

    dataset = ray.data.range(50, override_num_blocks=3).map_batches(add_columns).filter(lambda row: row["id"] < 33)
    rows = read(dataset if is_lazy else _in_order(dataset))
    assert rows["id"] == list(range(33))
    assert rows["square"] == [n**2 for n in range(33)]
    assert rows["pair"] == [[n, -n] for n in range(33)]
    assert dataset.context.execution_options.preserve_order is False  # restored


def test_blocks_of_a_materialized_dataset_are_referenced_with_their_sizes() -> None:
    import ray

    frames = [pd.DataFrame({"x": [1, 2]}), pd.DataFrame({"x": [3]})]
    (source,) = resolve_datasets({"train": ray.data.from_pandas(frames)}, ray.put).sources.values()
    assert source.block_rows == (2, 1)
    assert all(isinstance(block, ray.ObjectRef) for block in source.blocks)
    nobody = ray.data.range(9).filter(lambda row: False)
    (nothing,) = resolve_datasets(nobody.materialize(), ray.put).sources.values()
    assert nothing.num_rows == 0
    empty = WorkerDatasets(DatasetPlan({"train": nothing}), 0, 1, 0, fetch=ray.get).get()
    assert list(empty.get_split().to_torch(2)) == [] and empty.schema.names == []


def test_arrays_are_fetched_from_the_object_store() -> None:
    assert read({"x": np.arange(20.0)}) == {"x": [float(n) for n in range(20)]}


def test_stratified_folds_of_a_ray_dataset() -> None:
    import ray

    dataset = ray.data.range(40, override_num_blocks=3).map_batches(add_columns).materialize()
    for train, validation in to_cv(dataset, 4, group="id"):
        assert sorted(read(train)["id"] + read(validation)["id"]) == list(range(40))


def test_lazy_dataset_is_executed_once_for_its_folds(caplog: pytest.LogCaptureFixture) -> None:
    import ray

    def lazy() -> Any:
        return ray.data.range(40, override_num_blocks=4).map_batches(add_columns)

    with caplog.at_level(logging.INFO, "raysgd"):
        pairs = to_cv(lazy(), 4, seed=1)
    (text,) = [record.getMessage() for record in caplog.records if "to_cv" in record.getMessage()]
    assert re.search(r"its 40 rows take \d+ MiB of the object store", text)
    folds = [read(validation)["id"] for _, validation in pairs]
    assert sorted(row for fold in folds for row in fold) == list(range(40))
    assert folds == [read(validation)["id"] for _, validation in to_cv(_in_order(lazy()), 4, seed=1)]
