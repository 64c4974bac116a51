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
    ("module", "unwanted", "limit"),
    [
        ("raysgd.controller.trainer_actor", HEAVY + LATER, 90),
        ("raysgd.workers.process.worker_actor", HEAVY + LATER, 45),
        ("raysgd.trainer.trainer", HEAVY, 152),
    ],
)
def test_process_starts_without_heavy_modules(module: str, unwanted: tuple[str, ...], limit: int) -> None:
    """``limit``: modules that it imports in addition to those of Ray."""
    code = f"""
import json, sys
import ray
before = set(sys.modules)
import {module}
new = set(sys.modules) - before
print(json.dumps([[name for name in {unwanted} if name in new], len(new)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, count = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert count <= limit
