"""What importing raysgd.checkpoint loads: the control plane must stay free of frameworks and start fast."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import sys
{code}
loaded = [name for name in {forbidden!r} if name in sys.modules]
assert not loaded, loaded
"""


def run(code: str, *forbidden: str) -> None:
    result = subprocess.run([sys.executable, "-c", CHECK.format(code=code, forbidden=forbidden)], capture_output=True)
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.parametrize("name", ["storage.storage", "format.manifest", "retention", "store", "checkpoint"])
def test_control_plane_modules_import_no_framework(name: str) -> None:
    run(f"import raysgd.checkpoint.{name}", "torch", "ray", "tensorflow", "jax", "numpy", "pyarrow", "cloudpickle")


def test_no_module_imports_torch_or_ray() -> None:
    code = """
import importlib, pkgutil, raysgd.checkpoint
for module in pkgutil.walk_packages(raysgd.checkpoint.__path__, "raysgd.checkpoint."):
    importlib.import_module(module.name)
"""
    run(code, "torch", "ray", "tensorflow", "jax")


def test_manifest_is_written_and_read_without_numpy_and_torch() -> None:
    code = """
from raysgd.checkpoint.format.manifest import Manifest
m = Manifest(number=1, attempt=1, iteration=1, time_total_s=1, world_size=1, created_s=1, metrics={"a": float("nan")})
Manifest.from_json(m.to_json())
"""
    run(code, "torch", "numpy", "pyarrow", "cloudpickle")


def test_state_without_tensors_is_saved_and_loaded_without_torch() -> None:
    code = """
import numpy as np
from raysgd.checkpoint.format.parts import MemoryPart
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
snapshot = take_snapshot({"a": np.arange(3), "b": [1, 2], "f": np.random.default_rng(1)}, StagingPool())
assert MemoryPart(snapshot.payload).load(allow_pickle=False)["a"].tolist() == [0, 1, 2]
"""
    run(code, "torch", "ray", "cloudpickle")


def test_loading_tensors_without_torch_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None
from raysgd.checkpoint.codecs.tree import decode_small
try:
    decode_small(["torch.dtype", "float32"])
except ImportError as error:
    assert "raysgd[torch]" in str(error), error
else:
    raise AssertionError("no error")
del sys.modules["torch"]
"""
    run(code, "ray")
