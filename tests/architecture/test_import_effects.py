"""What importing raysgd, or one of its modules, loads and does. Asked in a fresh process each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.project import modules

FRAMEWORKS = ("horovod", "jax", "tensorflow", "torch")
# Packages, and modules, that are made for one framework, and may load it.
OF_A_FRAMEWORK = (
    "raysgd.checkpoint.placing.", "raysgd.torch.", "raysgd.tensorflow.", "raysgd.jax.", "raysgd.engine.",
    "raysgd.functions.worker.", "raysgd.functions.checkpoints.", "raysgd.functions.schedules.", "raysgd.functions.trees.",
    "raysgd.functions.sharding.", "raysgd.functions.models.",
    "raysgd.declarative.components.", "raysgd.declarative.loop.", "raysgd.declarative.reductions.", "raysgd.declarative.sft.",
    "raysgd.train.templates.",
)  # fmt: skip

PROBE = """
import json, os, sys, threading

def state():
    return dict(environment=dict(os.environ), folder=os.getcwd(), files=sorted(os.listdir()),
                threads=sorted(thread.name for thread in threading.enumerate()),
                path=list(sys.path), excepthook=repr(sys.excepthook))

before = state()
for name in {names!r}:
    __import__(name)
print(json.dumps(dict(before=before, after=state(), loaded=sorted(name for name in sys.modules if "." not in name))))
"""


def _import(names: list[str], folder: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROBE.format(names=names)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    states: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return states


def test_importing_raysgd_loads_neither_ray_nor_a_framework(tmp_path: Path) -> None:
    loaded = _import(["raysgd"], tmp_path)["loaded"]
    assert not set(loaded) & {"ray", "numpy", "pandas", "pyarrow", "rich", *FRAMEWORKS}


def test_importing_raysgd_changes_nothing(tmp_path: Path) -> None:
    states = _import(["raysgd"], tmp_path)
    assert states["after"] == states["before"]


def test_no_module_but_those_of_a_framework_loads_one(tmp_path: Path) -> None:
    others = [name for name in modules() if not f"{name}.".startswith(OF_A_FRAMEWORK)]
    loaded = _import(others, tmp_path)["loaded"]
    assert not set(loaded) & {*FRAMEWORKS, "mlflow", "wandb"}
