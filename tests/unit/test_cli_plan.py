"""``raysgd plan``: a plan for functions that are given by name, as a table and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raysgd.cli.main import main

Run = Callable[..., tuple[int, str, str]]

MODELS = """
import torch


def make_model():
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))


def make_batch():
    return torch.empty(16, 256, device="meta")


def loss(model, batch):
    return model(batch).square().mean()


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 1)

    def forward(self, batch):
        return self.layer(batch).square().mean()


def make_rows(size):
    return [torch.zeros(256) for _ in range(size)]


WIDTH = 256
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Run ``raysgd plan`` in this process, in a folder with a module; return its exit status, output and error output."""
    (tmp_path / "models_of_plan.py").write_text(MODELS)
    (tmp_path / "broken_of_plan.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["plan", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    yield call
    for name in ("models_of_plan", "broken_of_plan"):
        sys.modules.pop(name, None)


BATCH = ["--batch", "models_of_plan:make_batch", "--num-workers", "2"]
TOO_SMALL = [*BATCH, "--memory-per-device", "2e6", "--loss", "models_of_plan:loss"]
FLAGS = [*BATCH, "--memory-per-device", "1e9", "--loss", "models_of_plan:loss"]


def test_plan_shows_the_choice_with_its_reason(run: Run) -> None:
    status, out, err = run(*FLAGS, "models_of_plan:make_model")
    assert (status, err) == (0, "")
    assert out.startswith("Plan for 526,336 parameters") and "Chosen: data x2" in out
    flags = "--engine.fused-optimizer true"
    assert out.splitlines()[-1] == f"loader batches of 8 rows; flags of `raysgd run`: {flags}"


def test_plan_fits_into_less_memory_by_other_strategies(run: Run) -> None:
    small = [*BATCH, "--memory-per-device", "7e6", "--loss", "models_of_plan:loss"]
    status, out, _ = run(*small, "--json", "models_of_plan:make_model")
    assert status == 0
    found = json.loads(out)
    assert found["chosen"]["config"]["zero_stage"] == 3 and found["chosen"]["is_fitting"]
    assert found["chosen"]["memory"]["total"] <= 7e6 * 0.95
    assert {one["is_fitting"] for one in found["candidates"]} == {True, False}
    assert "--engine.zero-stage 3" in run(*small, "models_of_plan:make_model")[1]


def test_fields_that_are_chosen_by_hand_are_not_varied(run: Run) -> None:
    words = ["--engine.zero-stage", "1", "--optimizer", "models_of_plan:make_optimizer", "--json"]
    found = json.loads(run(*FLAGS, *words, "models_of_plan:make_model")[1])
    assert {one["config"].get("zero_stage") for one in found["candidates"]} == {1}
    assert found["chosen"]["memory"]["optimizer"] == 0, "plain SGD has no state"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Missing argument 'MODEL"),
        (["models_of_plan:make_model"], "raysgd plan needs --batch"),
        ([*BATCH, "--memory-per-device", "1e9", "models_of_plan"], "MODEL models_of_plan: give module:function"),
        ([*FLAGS, "models_of_plan.py:make_model"], "give the name of the module, models_of_plan:make_model"),
        ([*FLAGS, "modles:make_model"], "there is no module modles in "),
        ([*FLAGS, "models_of_plan:make_modle"], "has no function make_modle (did you mean 'make_model'?)"),
        ([*FLAGS, "models_of_plan:WIDTH"], "has no function WIDTH"),
        ([*FLAGS, "--engine.zero", "1", "x:y"], "did you mean '--engine.zero-stage'?"),
        ([*FLAGS, "--device", "tpu", "x:y"], "device='tpu' is not known"),
        ([*TOO_SMALL, "models_of_plan:make_model"], "The model fits nowhere"),
    ],
)  # fmt: skip
def test_mistake_is_explained(run: Run, words: list[str], text: str) -> None:
    status, _, err = run(*words)
    assert status == 2 and text in err


JOB = """\
compute_config: {runtime_ngpus: 2}
micro_batch_size: 8
max_epochs: 1
model: {type: models_of_plan.Line}
optimizer: {type: torch.optim.SGD, args: {lr: 0.1}}
dataset: {type: models_of_plan.make_rows, train_args: {size: 20}}
"""


def test_training_of_a_file_is_planned(run: Run) -> None:
    Path("job.yaml").write_text(JOB)
    status, out, err = run("-f", "job.yaml", "--engine.memory_per_device", "1e9")
    assert (status, err) == (0, "")
    assert out.startswith("Plan for 257 parameters") and out.splitlines()[-1].startswith("flags of `raysgd train`: ")
    found = json.loads(run("--file=job.yaml", "--compute_config.runtime_ngpus", "4", "--json")[1])
    assert (found["num_workers"], found["num_parameters"]) == (4, 257)
    assert not Path(".nnscaler").exists(), "`raysgd train --run_mode compile` writes files"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-f"], "raysgd plan: Option '-f' requires an argument"),
        (["-f", "nothing.yaml"], "nothing.yaml cannot be read"),
        (["-f", "job.yaml", "--max_epoch", "2"], "max_epoch: there is no such field (did you mean 'max_epochs'?)"),
        (["-f", "job.yaml", "--jsn"], "--jsn is neither a flag nor a field (did you mean '--json'?)"),
        (["-f", "job.yaml", "--allow-import", "torch"], "models_of_plan.Line may not be imported"),
        (
            ["-f", "job.yaml", "--engine.memory_per_device", "100"],
            "engine.memory_per_device: memory_per_device=100 is less than a megabyte",
        ),
        (["-f", "job.yaml", "--dataset.train_args.size", "0"], "the training data has no row"),
    ],
)
def test_training_that_cannot_be_planned_is_explained(run: Run, words: list[str], text: str) -> None:
    Path("job.yaml").write_text(JOB)
    status, _, err = run(*words)
    assert status == 2 and text in err
    assert len(err.splitlines()) == 1


def test_error_inside_of_a_module_is_that_of_the_module(run: Run) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        run(*FLAGS, "broken_of_plan:make_model")
