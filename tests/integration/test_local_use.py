"""The same train_func without Ray: called directly, under raysgd.local, and then by a Trainer.

The plain calls are in processes of their own, as a user would start them; importing Ray there is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import UsageError
from support.project import ROOT
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)

SCRIPT = """
import json
import sys

sys.modules["ray"] = None  # importing it fails from here on

import raysgd
from raysgd.errors import MetricError


def train_func(config):
    state = raysgd.load_checkpoint()
    start = 0 if state is None else state["step"] + 1
    for step in range(start, config["steps"]):
        raysgd.report(step=step, loss=1 / (step + 1))
        raysgd.save_checkpoint({"step": step})
        if step == config.get("fails_at"):
            raise RuntimeError("the power is out")
    return start


def facts():
    return {
        "in_worker": raysgd.in_worker(),
        "ranks": [raysgd.world_rank(), raysgd.local_rank(), raysgd.node_rank()],
        "sizes": [raysgd.world_size(), raysgd.local_world_size()],
        "should_stop": raysgd.should_stop(),
        "broadcast": raysgd.broadcast("mine"),
        "barrier": raysgd.barrier(),
    }
"""


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT + code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_train_func_can_be_called_directly(tmp_path: Path) -> None:
    done = python(tmp_path, "print(train_func({'steps': 2}), json.dumps(facts()))")
    assert done.returncode == 0, done.stderr
    returned, _, facts = done.stdout.partition(" ")
    assert returned == "0"
    assert json.loads(facts) == {
        "in_worker": False,
        "ranks": [0, 0, 0],
        "sizes": [1, 1],
        "should_stop": False,
        "broadcast": "mine",
        "barrier": None,
    }
    assert done.stderr.splitlines() == ["[raysgd] 1: step=0  loss=1", "[raysgd] 2: step=1  loss=0.5"]
    assert os.listdir(tmp_path) == ["train.py"], "there is no place for checkpoints"


def test_local_run_refuses_invalid_metrics(tmp_path: Path) -> None:
    done = python(tmp_path, "raysgd.report(loss={1, 2})")
    assert done.returncode == 1
    assert "MetricError: report(loss=...) got a builtins.set" in done.stderr


def test_local_run_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    call = "with raysgd.local(dir='kept'):\n    print(train_func({'steps': 4, 'fails_at': %s}))"
    done = python(tmp_path, call % 1)
    assert done.returncode == 1 and "RuntimeError: the power is out" in done.stderr
    done = python(tmp_path, call % None)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "step=2" in done.stderr and "step=1" not in done.stderr
    done = python(tmp_path, call % None)
    assert done.stdout == "4\n"


def test_local_data_does_not_need_ray(tmp_path: Path) -> None:
    call = """
import numpy as np

with raysgd.local(dataset={"train": {"x": np.arange(5)}}):
    batches = raysgd.get_dataset("train").get_split().iter_batches(2)
    print([batch["x"].tolist() for batch in batches])
print(raysgd.get_datasets())
"""
    done = python(tmp_path, call)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[0, 1], [2, 3], [4]]", "{}"]


def test_trainer_and_local_run_resume_from_each_other(ray_cluster: Any, tmp_path: Path) -> None:
    call = "with raysgd.local(dir='kept'):\n    print(train_func({'steps': 2}))"
    assert python(tmp_path, call).stdout == "0\n"
    (newest,) = (tmp_path / "kept").glob("checkpoint_*2")

    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT.replace('sys.modules["ray"] = None', ""), namespace)
    train_func = namespace["train_func"]
    with make_trainer(tmp_path / "runs") as trainer:
        assert trainer.run(train_func, {"steps": 4}, resume_from=newest, callbacks=quiet(), returns="all") == [2, 2]
        saved = trainer.get_last_checkpoint()
    assert saved is not None
    assert python(tmp_path, f"print(raysgd.load_checkpoint({saved.path!r}))").stdout == "{'step': 3}\n"


def test_local_inside_a_worker_is_refused(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func() -> None:
        with raysgd.local():
            pass

    with make_trainer(tmp_path, 1) as trainer, pytest.raises(UsageError, match="inside a worker"):
        trainer.run(train_func, callbacks=quiet())
    with (
        raysgd.local(dir=tmp_path / "kept"),
        pytest.raises(UsageError, match="a session exists already"),
        raysgd.local(),
    ):
        pass
    assert raysgd.load_checkpoint() is None
