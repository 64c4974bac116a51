"""What a cold start must not wait for: packages the control plane can do without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("numpy", "pandas", "pyarrow", "rich", "tensorboardX", "torch", "tensorflow", "jax", "horovod")


@pytest.mark.parametrize("module", ["raysgd.controller.actor", "raysgd.workers.actor", "raysgd.trainer.trainer"])
def test_a_process_comes_up_without_heavy_packages(module: str) -> None:
    code = f"""
import json, sys
import ray
before = set(sys.modules)
import {module}
print(json.dumps([name for name in {HEAVY} if name in sys.modules and name not in before]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
