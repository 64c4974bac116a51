"""The scripts of ``examples/backends/``: each learns the digits as it is, through a death, and as the trials of a search.

torch_ddp.py, horovod_torch.py, horovod_tensorflow.py, tensorflow_loop.py, keras_fit.py, jax_loop.py
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray import tune

import raysgd
from raysgd.testing import FaultPlan, Kill, check_history
from support.examples import run_example
from support.project import ROOT
from support.runs import PATIENCE_S, events_of, latest_run, make_trainer, quiet, travels_by_value
from support.searches import Fit, column


@dataclass(frozen=True)
class Script:
    """An example: its name without the suffix, what its workers import, its backend, and a learning rate that does.

    And the name of its accuracy on unseen digits.
    """

    name: str
    framework: str
    backend: str | raysgd.BackendConfig
    lr: float = 1e-2
    accuracy: str = "accuracy"

    def load(self) -> ModuleType:
        """Its module, whose functions reach the workers as those of a script do."""
        spec = importlib.util.spec_from_file_location(self.name, ROOT / "examples" / "backends" / f"{self.name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.name] = module
        spec.loader.exec_module(module)
        travels_by_value(self.name)
        return module


SCRIPTS = [
    Script("torch_ddp", "torch", "torch"),
    Script("horovod_torch", "horovod", "horovod"),
    Script("horovod_tensorflow", "horovod", raysgd.HorovodConfig(framework="tensorflow")),
    Script("tensorflow_loop", "tensorflow", "tensorflow"),
    Script("keras_fit", "tf_keras", "tensorflow", accuracy="val_accuracy"),
    Script("jax_loop", "jax", "jax", lr=0.1),
]
NEEDED = {
    "horovod": "make horovod",
    "tensorflow": "pip install raysgd[tensorflow]",
    "tf_keras": "pip install raysgd[tensorflow]",
    "jax": "pip install raysgd[jax]",
}
#: To Tune all loops are alike: one that users write, and one that a framework has.
SEARCHED = [script for script in SCRIPTS if script.name in ("torch_ddp", "keras_fit")]
EPOCHS = 8
MEANS = {"loss": "mean", "accuracy": "mean"}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.name)
def script(request: pytest.FixtureRequest) -> Script:
    found: Script = request.param
    if importlib.util.find_spec(found.framework) is None:
        pytest.skip(f"{found.name}.py needs {found.framework}, which is not installed: {NEEDED[found.framework]}")
    return found


@pytest.fixture
def module(script: Script) -> Iterator[ModuleType]:
    yield script.load()
    del sys.modules[script.name]


def test_it_runs_as_a_user_runs_it(script: Script, tmp_path: Path) -> None:
    output = run_example(f"backends/{script.name}.py", folder=tmp_path)
    (accuracy,) = re.findall(r"^validation accuracy: (\S+)$", output, re.MULTILINE)
    assert float(accuracy) >= 0.95


@pytest.mark.fault
def test_training_continues_when_a_worker_is_killed(
    script: Script, module: ModuleType, ray_cluster: Any, tmp_path: Path
) -> None:
    plan = FaultPlan([Kill(rank=1, step=4)])
    failure = raysgd.FailureConfig(max_failures=1, abort_grace_s=20)
    with make_trainer(tmp_path, 2, script.backend, seed=0, failure_config=failure) as trainer:
        given: dict[str, Any] = {"dataset": module.make_data(), "reduce": MEANS, "callbacks": quiet()}
        trainer.run(plan.wrap(module.train_func), {"lr": script.lr, "epochs": EPOCHS}, **given)
        plan.assert_all_fired()
        assert len(events_of(trainer, "failure")) == 1
        run = latest_run(trainer)
    check_history(run.run_dir, within_s=PATIENCE_S)
    assert run.metrics["training_iteration"].tolist() == list(range(1, EPOCHS + 1))
    assert run.metrics["epoch"].tolist() == list(range(EPOCHS))
    assert run.metrics["attempt"].nunique() == 2, "training continued in the same attempt"
    assert run.checkpoints[-1].metrics[script.accuracy] >= 0.95


@pytest.mark.usefixtures("no_leftovers_of_trials")
@pytest.mark.parametrize("script", SEARCHED, indirect=True, ids=lambda script: script.name)
def test_it_is_searched_by_tune(script: Script, module: ModuleType, fit: Fit) -> None:
    trainer = raysgd.Trainer(2, script.backend, seed=0)
    trainable = trainer.to_trainable(module.train_func, dataset=module.make_data(), reduce=MEANS)
    grid = fit(trainable, {"lr": tune.grid_search([script.lr / 3, script.lr]), "epochs": 3})
    assert [result.error for result in grid] == [None, None]
    for result in grid:
        assert column(result, "training_iteration") == [1, 2, 3]
        accuracies = column(result, script.accuracy)
        assert accuracies[-1] >= 0.85 and accuracies[-1] > accuracies[0]
        assert raysgd.load_checkpoint(result.checkpoint.path)["epoch"] == 2
