"""The settings of a Trainer: their defaults, and errors that say what was given, what is allowed, and what to do."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from raysgd.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, from_mapping
from raysgd.errors import ConfigError

CONFIGS = [RunConfig, FailureConfig, CheckpointConfig, ScalingConfig]


# -- all of them -------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_that_are_documented() -> None:
    assert dataclasses.asdict(RunConfig()) == {
        "name": None,
        "storage_path": None,
        "detached": False,
        "ray_address": None,
    }
    assert dataclasses.asdict(FailureConfig()) == {
        "max_failures": 3,
        "num_spares": 0,
        "abort_grace_s": 2,
        "heartbeat_timeout_s": 10,
        "callback_timeout_s": 300,
        "progress_timeout_s": None,
        "mismatch_timeout_s": 60,
        "preemption_grace_s": 25,
        "stop_grace_s": 30,
        "start_timeout_s": 120,
        "wait_for_nodes_s": 0,
        "retry_on": (),
        "on_resize": None,
    }
    assert dataclasses.asdict(CheckpointConfig()) == {
        "num_to_keep": None,
        "scope": "run",
        "score_attribute": None,
        "keep_best": {},
        "links": False,
        "score_order": "max",
        "storage_interval": 1,
        "keep_in_memory": True,
        "max_pending_bytes": 4 * 2**30,
        "on_write_error": "raise",
    }
    assert dataclasses.asdict(ScalingConfig()) == {
        "num_workers": 1,
        "cpus_per_worker": 1,
        "gpus_per_worker": 0,
        "resources_per_worker": {},
        "placement_strategy": "PACK",
        "workers_per_replica": 1,
    }


@pytest.mark.parametrize("config", CONFIGS)
def test_config_is_keyword_only_frozen_and_picklable(config: Any) -> None:
    made = config()
    first = dataclasses.fields(config)[0].name
    with pytest.raises(TypeError):
        config(getattr(made, first))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, first, None)
    assert pickle.loads(pickle.dumps(made)) == made


def refused(config: Any, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(name in text for name in fields)
    return text


# -- where a run's files go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "run-1_a.b", "0", "_", "-x", "a" * 128])
def test_names_that_can_be_a_folder(name: str) -> None:
    assert RunConfig(name=name).name == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "/abs", "a b", "a\n", "é", "a" * 129, 5, b"a"]
)
def test_names_that_cannot_be_a_folder_are_refused(name: Any) -> None:
    assert "cannot name a folder" in refused(RunConfig, name=name)


@pytest.mark.parametrize("path", ["~/runs", "s3://bucket/runs", Path("/runs")])
def test_a_storage_path_is_a_path_or_a_uri(path: Any) -> None:
    assert RunConfig(storage_path=path).storage_path == path


@pytest.mark.parametrize("path", [5, b"/runs", ["/runs"], True])
def test_storage_path_that_is_not_a_path_is_refused(path: Any) -> None:
    assert "give a path or a URI" in refused(RunConfig, storage_path=path)


def test_detached_run_needs_a_name() -> None:
    assert RunConfig(name="x", detached=True).detached
    assert "needs name=" in refused(RunConfig, detached=True)


@pytest.mark.parametrize("address", ["local", "auto", "10.0.0.1:6379", "head:6379"])
def test_ray_address_is_a_word_or_a_host_with_a_port(address: str) -> None:
    assert RunConfig(ray_address=address).ray_address == address


@pytest.mark.parametrize("address", ["ray://head:10001", "", 6379])
def test_other_ray_addresses_are_refused(address: Any) -> None:
    assert "HOST:PORT" in refused(RunConfig, ray_address=address)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"max_failures": -1},
        {"max_failures": 0},
        {"abort_grace_s": 0},
        {"heartbeat_timeout_s": 0.5},
        {"progress_timeout_s": "auto"},
        {"progress_timeout_s": 30},
        {"mismatch_timeout_s": None},
        {"on_resize": lambda old, new: None},
        {"wait_for_nodes_s": 600},
    ],
)
def test_valid_failure_settings_are_accepted(fields: dict[str, Any]) -> None:
    FailureConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_failures": -2}, "-2 is too small; give an int >= -1"),
        ({"max_failures": 1.5}, "is a float; give an int"),
        ({"max_failures": True}, "is a bool; give an int"),
        ({"max_failures": "3"}, "is a str; give an int"),
        ({"max_failures": None}, "is a NoneType; give an int"),
        ({"num_spares": -1}, "-1 is too small; give an int >= 0"),
        ({"abort_grace_s": -1}, "out of range; give a finite number >= 0"),
        ({"abort_grace_s": math.inf}, "out of range"),
        ({"heartbeat_timeout_s": 0}, "give a finite number > 0"),
        ({"heartbeat_timeout_s": math.nan}, "out of range"),
        ({"preemption_grace_s": -1}, "give a finite number >= 0"),
        ({"stop_grace_s": -1}, "give a finite number >= 0"),
        ({"start_timeout_s": 0}, "give a finite number > 0"),
        ({"start_timeout_s": "120"}, "is a str; give a number"),
        ({"wait_for_nodes_s": -1}, "give a finite number >= 0"),
        ({"retry_on": "ConnectionError"}, "is not a tuple of exception classes; give one such as (ConnectionError,)"),
        (
            {"retry_on": (OSError, KeyboardInterrupt)},
            "which is not a class of exceptions; give a subclass of Exception",
        ),
        ({"retry_on": OSError("disk")}, "is not a tuple of exception classes"),
        ({"progress_timeout_s": 0}, "give a finite number > 0"),
        ({"progress_timeout_s": "automatic"}, "is a str; give a number"),
        ({"mismatch_timeout_s": 0}, "give a finite number > 0"),
        ({"on_resize": "callback"}, "is not callable; give fn(old_size, new_size)"),
    ],
)
def test_invalid_failure_settings_are_refused(fields: dict[str, Any], text: str) -> None:
    assert text in refused(FailureConfig, **fields)


@pytest.mark.parametrize("given", [OSError, (OSError,), [OSError]])
def test_exceptions_to_retry_are_a_tuple(given: Any) -> None:
    assert FailureConfig(retry_on=given).retry_on == (OSError,)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_to_keep": 0}, "0 is too small; give an int >= 1"),
        ({"num_to_keep": 1.0}, "is a float; give an int"),
        ({"num_to_keep": True}, "is a bool"),
        ({"score_attribute": 3}, "is not a metric's name"),
        ({"keep_best": ["loss"]}, "is not a mapping of metrics to 'max' or 'min'"),
        ({"keep_best": {"loss": "low"}}, "'low' is not known"),
        ({"links": 1}, "is not a bool"),
        ({"score_order": "maximum"}, "give one of 'max', 'min' (did you mean 'max'?)"),
        ({"score_order": None}, "is not known; give one of 'max', 'min'"),
        ({"storage_interval": 0}, "too small"),
        ({"max_pending_bytes": 0}, "give an int >= 1"),
        ({"on_write_error": "ignore"}, "give one of 'raise', 'warn'"),
        ({"on_write_error": ["warn"]}, "give one of 'raise', 'warn'"),
    ],
)
def test_invalid_checkpoint_settings_are_refused(fields: dict[str, Any], text: str) -> None:
    assert text in refused(CheckpointConfig, **fields)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "least", "most", "is_elastic"),
    [
        (1, 1, 1, False),
        (8, 8, 8, False),
        ((2, 8), 2, 8, True),
        ((3, 3), 3, 3, True),
        ((1, math.inf), 1, math.inf, True),
    ],
)
def test_workers_are_a_number_or_a_range(num_workers: Any, least: int, most: float, is_elastic: bool) -> None:
    scaling = ScalingConfig(num_workers=num_workers)
    assert (scaling.min_workers, scaling.max_workers, scaling.is_elastic) == (least, most, is_elastic)


@pytest.mark.parametrize(
    ("num_workers", "text"),
    [
        (0, "num_workers=0 is too small; give an int >= 1"),
        (-1, "too small"),
        (2.0, "num_workers=2.0 is a float; give an int"),
        (True, "is a bool"),
        ("2", "is a str"),
        ([2, 8], "is a list"),
        (math.inf, "is a float"),
        ((0, 2), "num_workers[0]=0 is too small"),
        ((1, 2.5), "num_workers[1]=2.5 is a float"),
        ((math.inf, math.inf), "num_workers[0]=inf is a float"),
        ((1,), "has 1 entries; give (min, max)"),
        ((1, 2, 3), "has 3 entries; give (min, max)"),
        ((8, 4), "num_workers=(8, 4) has its minimum above its maximum; give (min, max) with min <= max."),
    ],
)
def test_invalid_number_of_workers_is_refused(num_workers: Any, text: str) -> None:
    assert text in refused(ScalingConfig, num_workers=num_workers)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cpus_per_worker": -1}, "out of range; give a finite number >= 0"),
        ({"cpus_per_worker": math.nan}, "out of range"),
        ({"cpus_per_worker": "2"}, "is a str; give a number"),
        ({"gpus_per_worker": True}, "is a bool; give a number"),
        ({"gpus_per_worker": 1.5}, "above 1 must be whole"),
        ({"placement_strategy": "pack"}, "give one of 'PACK', 'SPREAD', 'STRICT_PACK', 'STRICT_SPREAD'"),
        ({"placement_strategy": "STRICT_PAK"}, "did you mean 'STRICT_PACK'?"),
        ({"num_workers": (1, 2), "placement_strategy": "STRICT_PACK"}, "give 'PACK' or 'SPREAD'"),
        ({"resources_per_worker": [("TPU", 1)]}, "is not a dict; give {'name': amount}"),
        ({"resources_per_worker": {"CPU": 2}}, "did you mean cpus_per_worker=2?"),
        ({"resources_per_worker": {"cpu": 2}}, "did you mean cpus_per_worker=2?"),
        ({"resources_per_worker": {"num_gpus": 1}}, "did you mean gpus_per_worker=1?"),
        ({"resources_per_worker": {"cpus_per_worker": 1}}, "did you mean cpus_per_worker=1?"),
        ({"resources_per_worker": {"GPU": 1}}, "did you mean gpus_per_worker=1?"),
        ({"resources_per_worker": {"memory": 1e9}}, "'memory', which Ray reserves"),
        ({"resources_per_worker": {3: 1}}, "names are strings"),
        ({"resources_per_worker": {"TPU": -1}}, "['TPU']=-1 is out of range"),
        ({"resources_per_worker": {"TPU": "1"}}, "is a str; give a number"),
    ],
)
def test_invalid_resources_are_refused(fields: dict[str, Any], text: str) -> None:
    assert text in refused(ScalingConfig, **fields)


def test_bundle_has_all_resources_of_a_worker() -> None:
    scaling = ScalingConfig(cpus_per_worker=2, gpus_per_worker=0.5, resources_per_worker={"TPU": 4, "none": 0})
    assert scaling.bundle() == {"CPU": 2, "GPU": 0.5, "TPU": 4}
    assert ScalingConfig(cpus_per_worker=0).bundle() == {}


def test_resources_are_copied_from_the_caller() -> None:
    resources = {"TPU": 4.0}
    scaling = ScalingConfig(resources_per_worker=resources)
    scaling.bundle()["TPU"] = 9
    assert resources == {"TPU": 4.0}
    resources["TPU"] = 1
    assert scaling.bundle()["TPU"] == 4


# -- from a dict -------------------------------------------------------------------------------------------------------


def test_config_is_made_from_a_dict() -> None:
    assert from_mapping(FailureConfig, {"max_failures": 5}, "failure") == FailureConfig(max_failures=5)


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        (
            {"max_failure": 5},
            "failure has no field 'max_failure' (did you mean 'max_failures'?); its fields are max_fail",
        ),
        ({"lr": 0.1}, "failure has no field 'lr'; its fields are"),
        ({3: 1}, "failure has no field 3"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_field(mapping: dict[Any, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(FailureConfig, mapping, "failure")
    assert text in str(caught.value)


# -- what is not there yet ---------------------------------------------------------------------------------------------


def test_unlimited_group_needs_resources_per_worker() -> None:
    with pytest.raises(
        ConfigError, match="has no limit, and a worker takes no resources; give a maximum, or cpus_per_worker"
    ):
        ScalingConfig(num_workers=(1, math.inf), cpus_per_worker=0)
    ScalingConfig(num_workers=(1, math.inf), cpus_per_worker=0, resources_per_worker={"slot": 1})
    ScalingConfig(num_workers=(1, 4), cpus_per_worker=0)
