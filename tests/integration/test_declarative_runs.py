"""Declarative trainings on workers: the document's example, resuming to the bit, a death, a search, the command."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import raysgd
from raysgd.checkpoint.links import list_manifests
from raysgd.checkpoint.storage.storage import Storage
from raysgd.declarative import load_args, train
from raysgd.declarative.args import as_values
from raysgd.declarative.entry import Training
from raysgd.declarative.reading import args_of, merge
from raysgd.declarative.strategies import engine_fields
from raysgd.declarative.values import Importer
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError
from raysgd.testing import FaultPlan, Kill, check_history
from support import command, nnscaler_files
from support.engine_models import batch, build
from support.poll import until
from support.runs import PATIENCE_S, make_trainer, quiet

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

TESTS = str(Path(__file__).parents[1])
#: What the document's file names, as users have it: a module in the working directory.
MODULE = """\
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, dim, nlayers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(nlayers))
        self.loss_fn = nn.BCELoss()

    def forward(self, data):
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        return self.loss_fn(torch.sigmoid(x), data["target"])


class SimpleDataset(torch.utils.data.Dataset):
    def __init__(self, dim, size):
        self.data, self.target = torch.randn(size, dim), torch.rand(size, dim)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        return {"data": self.data[place], "target": self.target[place]}
"""
WAITING = f"""\
import os
import time
{MODULE}

class Waiting(MLP):
    def __init__(self, dim, nlayers, go):
        super().__init__(dim, nlayers)
        self.go = go

    def forward(self, data):
        while not os.path.exists(self.go):
            open(f"{{self.go}}.waits", "w").close()
            time.sleep(0.01)
        return super().forward(data)
"""
SLOW = f"""\
import os
import time
{MODULE}

class Slow(MLP):
    def __init__(self, dim, nlayers, folder):
        super().__init__(dim, nlayers)
        self.path = f"{{folder}}/steps"

    def forward(self, data):
        if os.path.exists(self.path):
            with open(self.path, "a") as file:
                file.write("x")
            time.sleep(0.1)
        return super().forward(data)
"""
DOCUMENT = """\
compute_config:
  plan_ngpus: 4
  runtime_ngpus: 4
  constant_folding: true
  use_zero: true
  use_end2end: true
run_mode: run
pas_policy: autodist
micro_batch_size: 2
global_batch_size: 8
max_epochs: 4
max_train_steps: 10
model:
  type: tests.cli.common.MLP
  args: {dim: 16, nlayers: 16}
optimizer:
  type: torch.optim.Adam
  args: {lr: 0.01}
dataset:
  type: tests.cli.common.SimpleDataset
  train_args: {dim: 16, size: 100}
  val_args: {dim: 16, size: 10}
checkpoint:
  keep_last_n_checkpoints: 3
  every_n_train_steps: 1
  save_type: deduped
"""
BASE: dict[str, Any] = {
    "model": {"type": "support.declared.MLP", "args": {"dim": 4, "nlayers": 3, "dropout": 0.1}},
    "optimizer": {"type": "torch.optim.AdamW", "args": {"lr": 0.01}},
    "dataset": {"type": "support.declared.SimpleDataset", "train_args": {"dim": 4, "size": 43, "noise": "torch"}},
    "lr_scheduler": {"type": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 1, "gamma": 0.5}},
    "compute_config": {"runtime_ngpus": 2},
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "max_epochs": 4,
    "seed": 5,
}
#: 43 rows, padded to 44: 22 of each rank are 11 micro-batches, 6 steps of two.
STEPS = 6


def training_of(values: dict[str, Any]) -> Training:
    fields = engine_fields(args_of(values), Importer())
    return Training({}, EngineConfig.of(fields), TESTS)


@pytest.mark.parametrize(
    "engine", [{"zero_stage": 3}, {"zero_stage": 1, "precision": "bf16-true"}], ids=["fsdp", "zero 1 and bf16"]
)
def test_four_epochs_equal_two_and_two_to_the_bit(tmp_path: Path, engine: dict[str, Any]) -> None:
    values = merge(BASE, {"engine": engine, "checkpoint.save_type": "sharded"})
    with make_trainer(tmp_path, 2, "torch", seed=5) as trainer:

        def run(resume_from: Any = None, **changes: Any) -> tuple[dict[str, Any], Any]:
            changed = as_values(args_of(merge(values, changes)))
            found = trainer.run(training_of(changed), changed, callbacks=quiet(), resume_from=resume_from)
            return found, trainer.get_last_checkpoint()

        whole, at_end = run()
        # Each rank saves its shards, and any number of ranks can load them.
        assert json.loads((Path(str(at_end.path)) / "manifest.json").read_text())["is_reshardable"]
        for steps in (2 * STEPS, STEPS + 2):
            _, half = run(max_train_steps=steps)
            resumed, resumed_end = run(resume_from=half)
            assert resumed["train_loss"] == whole["train_loss"]
            assert resumed["finished_train_steps"] == 4 * STEPS
            assert resumed["lr"] == whole["lr"] == 0.01 * 0.5**3
            _assert_same(at_end.load()["model"], resumed_end.load()["model"])
        _, merged = run(**{"checkpoint.save_type": "merged", "max_train_steps": STEPS})
        sharded, _ = run(resume_from=merged)
        assert sharded["finished_train_steps"] == 4 * STEPS


#: The models that the fields of a YAML file make, and their data.
FILES = {
    "gpt2": """
model:
  type: support.declared.Gpt2
  args:
    config: {__type: transformers.GPT2Config, n_layer: 2, n_head: 2, n_embd: 16, vocab_size: 64, n_positions: 12}
dataset: {type: support.declared.Tokens, train_args: {size: 24, length: 12}, val_args: {size: 5, length: 12}}
""",
    "convolutional": """
model: {type: support.declared.ConvNet, args: {channels: 4}}
dataset: {type: support.declared.Images, train_args: {size: 24}, val_args: {size: 5}}
""",
    "mlp": """
model: {type: support.declared.MLP, args: {dim: 4, nlayers: 3, dropout: 0.1}}
dataset: {type: support.declared.SimpleDataset, train_args: {dim: 4, size: 24, noise: torch}, val_args: {dim: 4, size: 5}}
""",
}
SETTINGS = """
compute_config: {runtime_ngpus: 2}
optimizer: {type: torch.optim.AdamW, args: {lr: 1e-2}}
lr_scheduler: {type: torch.optim.lr_scheduler.StepLR, args: {step_size: 2, gamma: 0.5}, interval: step}
micro_batch_size: 2
global_batch_size: 8
max_epochs: 3
seed: 5
checkpoint: {every_n_train_steps: 2}
"""


def test_killed_training_of_a_file_ends_with_the_same_weights(tmp_path: Path) -> None:
    retries = raysgd.FailureConfig(max_failures=1)
    with make_trainer(tmp_path, 2, "torch", seed=5, failure_config=retries) as trainer:
        for name, text in FILES.items():
            path = tmp_path / f"{name}.yaml"
            path.write_text(text + SETTINGS)
            values = as_values(load_args(path))
            ends = []
            for plan in (None, FaultPlan([Kill(rank=1, step=6)])):  # in the second epoch, a step after a checkpoint
                training = training_of(values)
                wrapped = training if plan is None else plan.wrap(training)
                found = trainer.run(wrapped, values, callbacks=quiet())
                ends.append((found["finished_train_steps"], trainer.get_last_checkpoint().load()["model"]))
            (steps, whole), (steps_after_kill, resumed) = ends
            assert (steps, steps_after_kill) == (9, 9), name
            _assert_same(whole, resumed)


def _assert_same(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    assert all(bool((value == other[name]).all()) for name, value in one.items())


def test_reductions_and_validation_are_over_all_ranks(tmp_path: Path) -> None:
    base = {
        "model": {"type": "support.declared.Mean"},
        "optimizer": {"type": "torch.optim.SGD", "args": {"lr": 1.0}},
        "dataset": {
            "type": "support.declared.Numbers",
            "train_args": {"values": [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]},  # rank 0: 1 3 5, rank 1: 2 4 9
            "val_args": {"values": [1.0, 2.0, 6.0]},
        },
        "dataset_sampler": {"train_args": {"shuffle": False}},
        "compute_config": {"runtime_ngpus": 2},
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "max_train_steps": 1,
        "checkpoint": {"no_save": True},
    }
    of_batches = (2 + 5 + 3 + 9) / 4
    tokens = {"type": "support.declared.Total"}
    counted = {"grad_reduction": "per-token-mean", "aggregate_outputs_fn": "support.declared.sum_tokens_of_ranks"}
    cases: list[tuple[dict[str, Any], float, float]] = [
        ({}, of_batches, of_batches),
        ({"optimizer": {"loss_reduction": "sum", "grad_reduction": "sum"}}, 4 * of_batches, 4 * of_batches),
        ({"optimizer": {"loss_reduction": "row-mean", "grad_reduction": "row-mean"}}, 4.0, 4.0),
        ({"model": tokens, "optimizer": counted}, 24 / 4, 4.0),
        ({"model": tokens, "optimizer": {**counted, "loss_reduction": "per-token-mean"}}, 4.0, 4.0),
    ]
    by_model = dict.fromkeys(("grad_reduction", "loss_reduction"), "per-token-mean")
    cases += [
        ({"model": tokens, "optimizer": by_model}, 4.0, 4.0),
        # Rank 0 has 1 3 5 7, and rank 1 has 2 4 9 and a repeated row, then a batch that only repeats rows.
        (
            {"model": tokens, "optimizer": by_model, "dataset": {"train_args": {"values": [1.0, 2, 3, 4, 5, 9, 7]}}},
            31 / 7,
            31 / 7,
        ),
        ({"model": tokens, "optimizer": by_model, "dataset": {"train_args": {"values": [1.0, 2, 3, 4, 5]}}}, 3.0, 3.0),
    ]
    with make_trainer(tmp_path, 2, "torch") as trainer:
        for changes, loss, gradient in cases:
            values = as_values(args_of(merge(base, changes)))
            found = trainer.run(training_of(values), values, callbacks=quiet())
            assert found["train_loss"] == pytest.approx(loss)
            assert found["gnorm"] == pytest.approx(gradient)
            if "model" not in changes or changes["optimizer"].get("loss_reduction") == "per-token-mean":
                weight = 1 - gradient
                assert found["val_loss"] == pytest.approx((1 + 2 + 6) / 3 * weight)  # no row of the padding counts


def test_loader_or_dataset_that_reads_all_rows_on_all_ranks_is_refused(tmp_path: Path) -> None:
    base = {
        "model": {"type": "support.declared.Mean"},
        "optimizer": {"type": "torch.optim.SGD", "args": {"lr": 1.0}},
        "dataset": {"type": "support.declared.Numbers", "train_args": {"values": [1.0, 2.0, 3.0, 4.0]}},
        "compute_config": {"runtime_ngpus": 2},
        "max_epochs": 1,
        "checkpoint": {"no_save": True},
    }
    stream = {"dataset.type": "support.declared.Stream"}
    no_sampler = {"dataloader.type": "support.declared.loader_without_sampler"}
    own_loader = {"dataloader.type": "support.declared.ReadsAll"}
    equal_rows = {"dataset.train_args": {"values": [1.0] * 4}}
    cases: list[tuple[dict[str, Any], str | None]] = [
        (no_sampler, "loader_without_sampler made a DataLoader without the sampler that it gets"),
        (
            {**no_sampler, "dataloader.train_args": {"is_shuffled": True}},
            "each of 2 replicas of the model would read all rows",
        ),
        (own_loader, "all 2 replicas of the model read the same batches: dataloader.type support.declared.ReadsAll"),
        (stream, "or support.declared.Stream is an IterableDataset that yields all rows on all ranks"),
        ({**stream, "dataset.train_args": {"values": [1.0, 2.0, 3.0, 4.0], "is_split": True}}, None),
        ({**stream, **equal_rows}, None),
        (equal_rows, None),
    ]
    with make_trainer(tmp_path, 2, "torch") as trainer:
        for changes, text in cases:
            values = as_values(args_of(merge(base, changes)))
            if text is None:
                trainer.run(training_of(values), values, callbacks=quiet())
                continue
            with pytest.raises(ConfigError, match=text):
                trainer.run(training_of(values), values, callbacks=quiet())


def test_rows_are_counted_alike_by_a_pipeline(tmp_path: Path) -> None:
    """Two replicas of the model, of two stages each, have 5 rows in batches of 2: the second repeats one."""
    kind = "gpt2"
    values = {
        "model": {"type": "support.engine_models.build", "args": {"kind": kind}},
        "optimizer": {"type": "torch.optim.SGD", "loss_reduction": "row-mean", "grad_reduction": "row-mean"},
        "dataset": {
            "type": "support.declared.DrawingRows",
            "train_args": {"kind": kind, "rows": 5, "folder": str(tmp_path)},
        },
        "compute_config": {"plan_ngpus": 2, "runtime_ngpus": 4},
        "pas_policy": "pp",
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "max_train_steps": 1,
        "checkpoint": {"no_save": True},
    }
    model = build(kind)
    loss = model(**batch(kind, 0, rows=5, is_even=True)).loss
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    values = as_values(args_of(values))
    with make_trainer(tmp_path, 4, "torch", workers_per_replica=2) as trainer:
        found = trainer.run(training_of(values), values, callbacks=quiet())
    assert found["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["gnorm"] == pytest.approx(norm.item(), rel=1e-5)
    # What rows draw, such as augmentation, is the same on both stages of a copy.
    draws = [(tmp_path / f"draws-{rank}").read_text() for rank in range(4)]
    assert draws[0] == draws[1] != draws[2] == draws[3]


def test_every_row_counts_once_through_a_death_and_a_smaller_group(tmp_path: Path) -> None:
    values = merge(
        BASE,
        {
            "hook": {"type": "support.declared.RowLog", "args": {"folder": str(tmp_path), "kill_at": 3}},
            "checkpoint.every_n_train_steps": 1,
            "max_epochs": 2,
        },
    )
    values["dataset"] = {"type": "support.declared.RowDataset", "train_args": {"size": 32}}
    values = as_values(args_of(values))
    failure = raysgd.FailureConfig(max_failures=2)
    with make_trainer(tmp_path / "runs", (1, 2), "torch", failure_config=failure) as trainer:
        found = trainer.run(training_of(values), values, callbacks=quiet())
        check_history(str(trainer.run_dir))
    assert found["finished_train_steps"] == 8
    assert (tmp_path / "killed").exists()
    lines = [json.loads(line) for path in tmp_path.glob("rows-*") for line in path.read_text().splitlines()]
    newest = {line["step"]: max(each["attempt"] for each in lines if each["step"] == line["step"]) for line in lines}
    seen = Counter(
        (line["epoch"], row) for line in lines if line["attempt"] == newest[line["step"]] for row in line["rows"]
    )
    assert seen == Counter({(epoch, row): 1 for epoch in range(2) for row in range(32)})


def test_the_documents_example_trains_and_continues(ray_cluster: dict[str, Any], tmp_path: Path) -> None:
    package = tmp_path / "tests" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "common.py").write_text(MODULE)
    (tmp_path / "job.yaml").write_text(DOCUMENT)
    words = ["train", "-f", "job.yaml", "--checkpoint.resume_from", "last", "--json", "--enable_progress_bar=false"]
    found = command.run(ray_cluster, tmp_path, *words)
    assert found.returncode == 0, found.stderr
    metrics = json.loads(found.stdout)
    assert metrics["finished_train_steps"] == 10
    runs = tmp_path / "checkpoints"
    checkpoints = [
        raysgd.Checkpoint.of_manifest(store.path(each.number), each)
        for store, each in list_manifests(Storage.from_uri(runs))
    ]
    assert (runs / "last").resolve() == Path(str(checkpoints[-1].path))
    best = raysgd.Checkpoint.from_path(runs / "best")
    assert best.metrics["loss"] == min(each.metrics["loss"] for each in checkpoints) == metrics["best_loss"]
    assert 3 <= len(checkpoints) <= 4
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    again = command.run(ray_cluster, tmp_path, *words)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_files_of_nnscaler_train_on_a_worker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)
    (tmp_path / "job.yaml").write_text(nnscaler_files.FILES[name][0])
    metrics = train(load_args(tmp_path / "job.yaml", ["--checkpoint.save_dir", str(tmp_path / "runs")]))
    assert metrics["finished_train_steps"] == {"images": 15, "tokens": 3}[name]
    folder = {"images": "logs/tb", "tokens": "lite"}[name]
    assert [*(tmp_path / "runs" / "run_001" / folder).glob("events*")]


@pytest.mark.parametrize("engine", [{"zero_stage": 3}, {"zero_stage": 1}], ids=["fsdp", "zero 1"])
def test_hooks_see_and_change_checkpoints_of_models_in_shards(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TESTS)
    hook = {"type": "support.declared.DoublingCheckpoints", "args": {"folder": str(tmp_path)}}
    checkpoint = {"save_dir": str(tmp_path / "runs"), "resume_from": "last"}
    values = merge(BASE, {"engine": engine, "hook": hook, "checkpoint": checkpoint, "enable_progress_bar": False})
    for steps in (2, 3):
        train(merge(values, {"max_train_steps": steps}))
    saved, restored = json.loads((tmp_path / "norms").read_text())
    assert restored == pytest.approx(2 * saved, rel=1e-5)


def test_a_detached_training_continues_without_the_command(ray_cluster: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WAITING)
    (tmp_path / "job.yaml").write_text(
        DOCUMENT.replace("tests.cli.common.MLP", "own.Waiting")
        .replace("tests.cli.common.", "own.")
        .replace("nlayers: 16", f"nlayers: 1, go: {tmp_path / 'go'}")
        .replace("plan_ngpus: 4", "plan_ngpus: 1")
        .replace("runtime_ngpus: 4", "runtime_ngpus: 1")
        .replace("val_args: {dim: 16, size: 10}", "")
    )
    words = ["train", "-f", "job.yaml", "--trainer.detached", "true", "--checkpoint.save_dir", "runs/of_a_file"]
    process = command.start(ray_cluster, tmp_path, *words)
    try:
        assert until((tmp_path / "go.waits").exists, PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    trainer = raysgd.Trainer.attach("of_a_file")
    try:
        assert trainer.status().state == "running"
        (tmp_path / "go").touch()
        steps = [result["training_iteration"] for result in trainer.stream()]
        assert steps == list(range(1, 11)) and trainer.status().state == "done"
    finally:
        trainer.shutdown()


def test_training_that_is_interrupted_twice_continues_to_the_bit(ray_cluster: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SLOW)
    (tmp_path / "job.yaml").write_text(
        DOCUMENT.replace("tests.cli.common.MLP", "own.Slow")
        .replace("tests.cli.common.", "own.")
        .replace("nlayers: 16", f"nlayers: 2, folder: {tmp_path}")
        .replace("plan_ngpus: 4", "plan_ngpus: 1")
        .replace("runtime_ngpus: 4", "runtime_ngpus: 1")
        .replace("every_n_train_steps: 1", "every_n_epochs: 1")
    )
    words = [
        "train",
        "-f",
        "job.yaml",
        "--json",
        "--enable_progress_bar=false",
        "--max_epochs=3",
        "--max_train_steps!",
        "--seed=3",
    ]
    whole = command.run(ray_cluster, tmp_path, *words, "--checkpoint.save_dir=whole")
    assert whole.returncode == 0, whole.stderr
    words += ["--checkpoint.save_dir=cut", "--checkpoint.resume_from=last"]
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        (tmp_path / "steps").write_text("")
        process = command.start(ray_cluster, tmp_path, *words, "--grace", "60")
        try:
            assert until(lambda: len((tmp_path / "steps").read_text()) > 3, PATIENCE_S) and process.poll() is None
            process.send_signal(number)
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert process.returncode == status
        assert "stopping: the run saves a checkpoint and ends, within 60 s" in err and "Traceback" not in err
    (tmp_path / "steps").unlink()
    last = command.run(ray_cluster, tmp_path, *words)
    assert last.returncode == 0, last.stderr
    names = ("train_loss", "val_loss", "finished_train_steps")
    assert [json.loads(last.stdout)[name] for name in names] == [json.loads(whole.stdout)[name] for name in names]
    runs = [raysgd.load_run(tmp_path / "cut" / f"run_00{number}") for number in (1, 2, 3)]
    assert [run.outcome for run in runs] == ["stopped", "stopped", "done"]
    found, expected = (raysgd.Checkpoint.from_path(tmp_path / folder / "last").load() for folder in ("cut", "whole"))
    for name, weight in expected["model"].items():
        assert torch.equal(found["model"][name], weight), name


def test_a_search_tries_values_of_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = merge(
        BASE,
        {
            "compute_config.runtime_ngpus": 1,
            "max_epochs": 1,
            "search": {"space": {"optimizer.args.lr": {"grid_search": [0.0001, 0.1]}}, "metric": "train_loss"},
            "checkpoint": {"save_dir": str(tmp_path / "runs")},
            "enable_progress_bar": False,
        },
    )
    monkeypatch.chdir(TESTS)
    found = train(values)
    assert found["config"]["optimizer.args.lr"] in (0.0001, 0.1)
    assert 1 <= found["step"] <= STEPS and found["train_loss"] <= found["last"]


def test_load_args_reads_the_document(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(DOCUMENT)
    assert load_args(tmp_path / "job.yaml").rows_per_step == 8
