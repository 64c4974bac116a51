"""What `raysgd` shows to its users. A change of this list is a change of the API: it belongs in the CHANGELOG."""

from __future__ import annotations

import subprocess
import sys

import raysgd

# What users name: `raysgd.X` for each.
DRIVER = [
    "Checkpoint",
    "Event",
    "Result",
    "ResultStream",
    "RunInfo",
    "RunStatus",
    "Trainer",
    "compare_runs",
    "load_run",
]
CONFIG = ["CheckpointConfig", "FailureConfig", "RunConfig"]
BACKENDS = [
    "Backend",
    "BackendConfig",
    "Coordinator",
    "HorovodConfig",
    "JaxConfig",
    "NoneConfig",
    "TensorflowConfig",
    "TorchConfig",
]
CALLBACKS = ["Callback", "Stop"]
WORKER = [
    "SavedArray",
    "barrier",
    "broadcast",
    "device",
    "get_dataset",
    "get_datasets",
    "in_worker",
    "load_checkpoint",
    "local",
    "local_rank",
    "local_world_size",
    "node_rank",
    "report",
    "save_checkpoint",
    "should_stop",
    "world_rank",
    "world_size",
]
# Reached through `raysgd` itself.
MODULES = ["backends", "callbacks", "data", "errors", "jax", "tensorflow", "torch", "tune_integration"]
PUBLIC = sorted([*DRIVER, *CONFIG, *BACKENDS, *CALLBACKS, *WORKER, *MODULES])


def test_the_public_names_are_these() -> None:
    assert sorted(raysgd.__all__) == PUBLIC


def test_every_public_name_is_there() -> None:
    missing = [name for name in raysgd.__all__ if not hasattr(raysgd, name)]
    assert not missing


def test_dir_lists_the_public_names() -> None:
    assert set(raysgd.__all__) <= set(dir(raysgd))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    done = _python("import raysgd; raysgd.trainr")
    assert "AttributeError" in done.stderr
    assert "trainr" in done.stderr


def test_star_import_works() -> None:
    done = _python("from raysgd import *; Trainer, report")
    assert done.returncode == 0, done.stderr


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
