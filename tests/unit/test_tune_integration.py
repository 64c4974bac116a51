"""The parts of trials that need no cluster: resources, summaries of folds, copies and deletion of checkpoints."""

from __future__ import annotations

import functools
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raysgd
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.retention import RetentionPolicy
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.errors import CheckpointNotFoundError, ConfigError
from raysgd.trainer.arguments import check_tuned_func
from raysgd.trainer.spec import make_spec
from raysgd.tune_integration import trial_resources
from raysgd.tune_integration.copies import Pruning, copy_checkpoint, uri_of
from raysgd.tune_integration.folds import numbers_of, summary
from raysgd.tune_integration.recipe import Recipe
from raysgd.workers.pickling import Packed, dumps, loads


def recipe(arguments_from: Any = None, **arguments: Any) -> Recipe:
    return Recipe(make_spec(**{"backend": "none", **arguments}), arguments_from, None)


def test_trial_reserves_a_bundle_per_worker_and_spare() -> None:
    asked = recipe(num_workers=2, cpus_per_worker=3, failure_config=raysgd.FailureConfig(num_spares=1)).resources({})
    assert asked.bundles == [{"CPU": 3.0}] * 3 and asked.head_bundle_is_empty
    assert recipe(num_workers=(2, 5)).resources({}).bundles == [{"CPU": 1.0}] * 2
    assert trial_resources(num_workers=2, placement_strategy="SPREAD").strategy == "SPREAD"
    assert trial_resources(raysgd.Trainer(1, "none", cpus_per_worker=0)).bundles == [{"memory": 1}]


def test_config_of_a_trial_changes_only_arguments_of_the_trainer() -> None:
    made = recipe("trainer", num_workers=2, seed=5)
    spec = made.spec_for({"trainer": {"num_workers": [1, None], "cpus_per_worker": 2}, "lr": 1.0})
    assert spec.scaling.num_workers == (1, math.inf) and spec.scaling.cpus_per_worker == 2 and spec.seed == 5
    assert made.spec_for({"lr": 1.0}) == made.spec
    for wrong, says in (
        ({"num_worker": 1}, "config\\['trainer'\\] has 'num_worker'"),
        ({"run_config": None}, "config\\['trainer'\\] has 'run_config'"),
        (3, "config\\['trainer'\\] is an int"),
        ({"num_workers": 0}, "num_workers"),
    ):
        with pytest.raises(ConfigError, match=says):
            made.spec_for({"trainer": wrong})
    assert made.resources({"trainer": {"num_workers": 0}}).bundles == [{"memory": 1}]  # it fails when it begins
    spec = recipe("trainer", backend="torch").spec_for({"trainer": {"backend_args": {"init_timeout_s": 7.0}}})
    assert spec.backend == raysgd.TorchConfig(init_timeout_s=7.0)
    with pytest.raises(ConfigError, match=r"trainer_args_from\(config\) is a list"):
        recipe(lambda config: []).spec_for({})


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6)), min_size=1, max_size=6))
def test_summary_of_folds_has_mean_and_standard_deviation(done: list[dict[str, float]]) -> None:
    found = summary(done)
    assert found["folds"] == len(done)
    shared = set.intersection(*map(set, done))
    assert set(found) == {"folds"} | shared | {f"{name}_std" for name in shared}
    for name in shared:
        values = [each[name] for each in done]
        assert found[name] == pytest.approx(np.mean(values), abs=1e-6)
        assert found[f"{name}_std"] == pytest.approx(statistics.pstdev(values), abs=1e-6)


def test_summary_of_diverged_fold_is_nan_or_infinite() -> None:
    found = summary([{"loss": 1.0, "big": 1e308}, {"loss": math.nan, "big": 1e308}, {"loss": math.inf, "big": 1e308}])
    assert math.isnan(found["loss"]) and math.isnan(found["loss_std"]) and found["big"] == math.inf
    assert summary([{"loss": math.inf}])["loss"] == math.inf


def test_file_system_without_a_uri_is_refused(tmp_path: Path) -> None:
    assert uri_of(Storage.from_uri(tmp_path)) == str(tmp_path)
    with pytest.raises(ConfigError, match="needs settings that the workers do not have"):
        uri_of(Storage(pyarrow.fs.SubTreeFileSystem("bucket", pyarrow.fs._MockFileSystem()), "exp/trial"))


def test_only_numbers_of_the_user_are_averaged() -> None:
    result = {"loss": 1, "ok": True, "name": "a", "training_iteration": 3, "attempt": 1, "deep": {"x": 1.0}}
    assert numbers_of(result) == {"loss": 1.0, "deep/x": 1.0}


def test_further_arguments_of_train_func_are_found_by_name() -> None:
    def plain(config: Any) -> None: ...
    def further(config: Any, data: Any, scale: float = 1.0, *, key: str) -> None: ...

    assert check_tuned_func(plain)[1] == ()
    assert sorted(check_tuned_func(further)[1]) == ["data", "key"]
    assert check_tuned_func(functools.partial(further, data=1, key="a"))[1] == ()
    for wrong in (3, dict, "train"):
        with pytest.raises(ConfigError):
            check_tuned_func(wrong)


def test_packed_function_is_unpickled_only_when_bound() -> None:
    def train_func(config: dict[str, Any], scale: float) -> float:
        return float(config["lr"] * scale)

    packed = loads(dumps(Packed.of(train_func, "train_func")))
    assert isinstance(packed, Packed) and packed.name.endswith("train_func")
    function, config = loads(dumps((packed.bind({"scale": 3.0}), {"lr": 2.0})))
    assert function(config) == 6.0 == packed.bind({"scale": 3.0})(config)


def commit(storage: Storage, number: int, loss: float = 0.0) -> Checkpoint:
    store = CheckpointStore(storage)
    parts = take_snapshot({"n": number, "data": b"x" * 3000}, StagingPool(1)).write(
        store.directory(number), part_prefix(1, 0)
    )
    manifest = Manifest(
        number=number,
        attempt=1,
        iteration=number * 10,
        time_total_s=1.0,
        world_size=1,
        created_s=1.0,
        metrics={"loss": loss},
        parts={0: parts},
    )
    return Checkpoint.of_manifest(store.commit(manifest), manifest)


def test_local_copy_of_a_checkpoint_is_hard_links(tmp_path: Path) -> None:
    storage = Storage.from_uri(tmp_path / "run" / "checkpoints")
    found = commit(storage, 3)
    source, target = Storage.from_uri(str(found.path)), Storage.from_uri(tmp_path / "trial" / "checkpoint_000000")
    copy_checkpoint(source, target)
    assert target.list_names() == source.list_names()
    (part,) = [name for name in source.list_names() if name != "manifest.json" and name.endswith(".json")]
    assert Path(source.path_of(part)).stat().st_ino == Path(target.path_of(part)).stat().st_ino
    copy_checkpoint(source, target, 31, {"loss": 0.5})  # again, after a try that was cut off
    copied = Checkpoint.from_path(target.uri)
    assert (copied.iteration, copied.metrics) == (31, {"loss": 0.5})
    assert Checkpoint.from_path(source.uri).iteration == 30
    other = Storage.from_uri(str(commit(Storage.from_uri(tmp_path / "run_002" / "checkpoints"), 7).path))
    copy_checkpoint(other, target)
    assert raysgd.load_checkpoint(target.uri)["n"] == 7
    copy_checkpoint(source, target)
    assert not any(name.startswith(".") or "tmp" in name for name in target.list_names())
    CheckpointStore(storage).delete(3)
    assert raysgd.load_checkpoint(target.uri)["n"] == 3
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(source, Storage.from_uri(tmp_path / "trial" / "checkpoint_000001"))


def test_copy_to_another_file_system_is_complete(tmp_path: Path) -> None:
    storage = Storage(pyarrow.fs._MockFileSystem(), "run/checkpoints")
    commit(storage, 3)
    found = CheckpointStore(storage).directory(3)
    target = Storage.from_uri(tmp_path / "copy")
    copy_checkpoint(found, target)
    assert raysgd.load_checkpoint(target.uri)["n"] == 3


def test_checkpoints_that_tune_has_are_deleted_by_the_checkpoint_config(tmp_path: Path) -> None:
    storage = Storage.from_uri(tmp_path / "run_001" / "checkpoints")
    found = {number: commit(storage, number, loss) for number, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0))}
    pruning = Pruning(RetentionPolicy(1, "loss", "min"))
    pruning.prune(str(tmp_path / "run_001"), {number: found[number] for number in (1, 2, 3)})
    assert CheckpointStore(storage).numbers() == [
        2,
        3,
        4,
    ]  # the best, the newest that Tune has, and those that Tune does not have
    pruning.prune(str(tmp_path / "run_001"), found)
    assert CheckpointStore(storage).numbers() == [2, 4]
    Pruning(RetentionPolicy(None)).prune(str(tmp_path / "run_001"), found)
    assert CheckpointStore(storage).numbers() == [2, 4]
