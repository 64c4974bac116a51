"""The modules that callbacks import, and the errors for missing libraries; each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import raysgd.callbacks

HEAVY = ("IPython", "mlflow", "numpy", "pandas", "pyarrow", "ray", "rich", "tensorboardX", "torch", "wandb")

MAKE_ALL = """
import sys
from raysgd.callbacks import *
from raysgd.callbacks.base import check_callbacks
made = [CsvCallback(), EarlyStoppingCallback("loss"), JsonLinesCallback(), PrintCallback(), ProgressCallback(),
        TensorBoardCallback(), TorchProfilerCallback()]
if {optional}:
    made += [MLflowCallback(), WandbCallback()]
check_callbacks(made)
print(*sorted(name for name in sys.modules if "." not in name))
"""

MISSING = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {package!r} else real(name, package)
sys.meta_path.insert(0, Missing())
from pathlib import Path
from raysgd.callbacks import *
from raysgd.callbacks.base import check_packages
from raysgd.testing.callback_suite import make_info
{code}
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def loaded(code: str) -> set[str]:
    done = run(code)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    names = loaded("import sys, raysgd.callbacks; print(*sys.modules)")
    assert not names & set(HEAVY)
    assert "raysgd.callbacks.progress.callback" not in names


@pytest.mark.parametrize("optional", [False, True])
def test_making_callbacks_loads_nothing_heavy(optional: bool) -> None:
    if optional:
        pytest.importorskip("mlflow")
        pytest.importorskip("wandb")
    assert not loaded(MAKE_ALL.format(optional=optional)) & set(HEAVY)


def test_progress_lines_do_not_import_rich(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from raysgd.callbacks import ProgressCallback
from raysgd.testing.callback_suite import drive
import io
drive(ProgressCallback(file=io.StringIO()), Path({folder!r}))
print(*sys.modules)
"""
    assert "rich" not in loaded(code.format(folder=str(tmp_path)))


def test_tensorboard_callback_does_not_import_torch(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from raysgd.callbacks import TensorBoardCallback
from raysgd.testing.callback_suite import drive
drive(TensorBoardCallback(), Path({folder!r}))
print(*sys.modules)
"""
    names = loaded(code.format(folder=str(tmp_path)))
    assert "tensorboardX" in names and "torch" not in names and "tensorflow" not in names
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("package", "code", "text"),
    [
        (
            "mlflow",
            "check_packages([MLflowCallback()])",
            "MLflowCallback needs mlflow, which is not installed here; run: pip ",
        ),
        (
            "wandb",
            "check_packages([Callback(), WandbCallback()])",
            "WandbCallback needs wandb, which is not installed here; ",
        ),
        (
            "tensorboardX",
            "check_packages([TensorBoardCallback()])",
            "TensorBoardCallback needs tensorboardX, which is not ",
        ),
        (
            "mlflow",
            "MLflowCallback().on_run_start(make_info(Path('run')))",
            "mlflow is not installed here; run: pip install",
        ),
        (
            "torch",
            "TorchProfilerCallback().on_run_start(make_info(Path('run')))",
            "torch is not installed here; run: pip ",
        ),
    ],
)
def test_missing_library_is_an_error_that_says_what_to_install(package: str, code: str, text: str) -> None:
    done = run(MISSING.format(package=package, code=code))
    last = done.stderr.strip().splitlines()[-1]
    assert (
        last.startswith(f"ImportError: {text}") and "pip install" in last and package in last.rpartition("install")[2]
    )


def test_every_public_name_is_there() -> None:
    assert [name for name in raysgd.callbacks.__all__ if not hasattr(raysgd.callbacks, name)] == []
    assert set(raysgd.callbacks.__all__) <= set(dir(raysgd.callbacks))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="CsvCalback"):
        raysgd.callbacks.CsvCalback  # noqa: B018
