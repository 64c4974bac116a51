"""What a cold start must not wait for: packages the control plane can do without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("numpy", "pandas", "pyarrow", "rich", "tensorboardX", "torch", "tensorflow", "jax", "horovod")
#: Modules of raysgd that a process imports when it has begun to start others, or to import its framework.
LATER = ("raysgd.checkpoint.codecs.tree", "raysgd.checkpoint.storage.storage")


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("raysgd.controller.actor", HEAVY + LATER),
        ("raysgd.workers.process.actor", HEAVY + LATER),
        ("raysgd.trainer.trainer", HEAVY),
    ],
)
def test_process_starts_without_heavy_modules(module: str, unwanted: tuple[str, ...]) -> None:
    code = f"""
import json, sys
import ray
before = set(sys.modules)
import {module}
print(json.dumps([name for name in {unwanted} if name in sys.modules and name not in before]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
