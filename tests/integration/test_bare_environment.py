"""raysgd outside of a Trainer needs neither Ray nor most of its other dependencies; `make gpu` relies on it.

The tests of tests/gpu run in a process in which everything but torch, NumPy, pyarrow and pytest cannot be imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.project import ROOT

#: What a machine with torch, NumPy, pyarrow and pytest may lack: the other dependencies of raysgd, and plugins of pytest.
HIDDEN = (
    "cloudpickle datasets hypothesis jax matplotlib orjson pandas psutil pytest_asyncio pytest_timeout ray rich safetensors "
    "tensorboardX tensorflow xdist"
)
#: Run by Python at its start, also in the processes that the tests start.
SITECUSTOMIZE = f"""
import sys

class WithoutHidden:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in {HIDDEN.split()!r}
        return None if is_hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [WithoutHidden(finder) for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs Python without the hidden packages."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    return run


@pytest.mark.timeout(260)  # some fifteen seconds alone
def test_gpu_tests_run_with_torch_and_pyarrow_alone(bare: Any) -> None:
    done = bare("-m", "pytest", "tests/gpu", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 11, done.stdout[-2000:]
    assert "needs Ray" in done.stdout
    assert ("needs a GPU, and torch sees none here" in done.stdout) == (not torch.cuda.is_available())


def test_modules_of_a_worker_are_imported_without_other_dependencies(bare: Any) -> None:
    done = bare(
        "-c", "import raysgd.torch, raysgd.checkpoint.snapshot, raysgd.data.dataset, raysgd.backends.torch; import ray"
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'ray'"


def test_gpu_benchmark_runs_with_torch_and_pyarrow_alone(bare: Any, tmp_path: Path) -> None:
    done = bare("benchmarks/gpu.py", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    assert [row["key"] for row in rows] == ["report", "cost", "stall", "first"]
    assert all("value" in row["cells"]["raysgd"] for row in rows)
    assert "in a process without Ray" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_benchmark_measures_nothing_without_a_gpu(bare: Any, tmp_path: Path) -> None:
    done = bare("benchmarks/gpu.py", "--output", str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "torch sees no GPU here, so nothing was measured.\n")
    assert os.listdir(tmp_path) == []
