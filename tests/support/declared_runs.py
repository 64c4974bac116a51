"""Declarative trainings of unit tests: what they train, in a world of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import raysgd
from raysgd.declarative.loop import TrainingLoop
from raysgd.declarative.reading import args_of, merge
from raysgd.declarative.strategies import engine_fields
from raysgd.declarative.values import Importer
from raysgd.engine.config import EngineConfig
from raysgd.session.rank_state import seed_generators

MLP = {
    "model": {"type": "support.declared.MLP", "args": {"dim": 4, "nlayers": 2, "dropout": 0.2}},
    "optimizer": {"type": "torch.optim.Adam", "args": {"lr": 0.01}},
    "dataset": {"type": "support.declared.SimpleDataset", "train_args": {"dim": 4, "size": 21}},
    "micro_batch_size": 2,
    "grad_accumulation_steps": 2,
    "max_epochs": 4,
    "seed": 3,
}
#: Six steps of an epoch: 21 rows are 11 micro-batches.
STEPS = 6
#: Makes the loss larger with each step.
RISING = {"type": "torch.optim.SGD", "args": {"lr": 1.0, "maximize": True}}


def training(**changes: Any) -> dict[str, Any]:
    return merge(MLP, {name.replace("__", "."): value for name, value in changes.items()})


def numbers(values: list[float], **changes: Any) -> dict[str, Any]:
    base = {
        "model": {"type": "support.declared.Mean"},
        "optimizer": {"type": "torch.optim.SGD", "args": {"lr": 1.0}},
        "dataset": {"type": "support.declared.Numbers", "train_args": {"values": values}},
        "dataset_sampler": {"train_args": {"shuffle": False}},
        "max_train_steps": 1,
    }
    return merge(base, {name.replace("__", "."): value for name, value in changes.items()})


def loop_of(values: dict[str, Any]) -> TrainingLoop:
    args = args_of(values)
    importer = Importer(args=args)
    return TrainingLoop(args, EngineConfig.of(engine_fields(args, importer)), importer)


def run(values: dict[str, Any], folder: Path | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train in a world of one; return the metrics and the weights."""
    seed_generators(values.get("seed") or 0, 0)
    with raysgd.local(dir=folder):
        loop = loop_of(values)
        metrics = loop.train()
        return metrics, {name: each.clone() for name, each in loop.model.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(each, other[name]) for name, each in one.items())


def run_without_seed(values: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with raysgd.local(dir=folder):
        loop = loop_of(values)
        metrics = loop.train()
        return metrics, {name: each.clone() for name, each in loop.model.state_dict().items()}


def check_resuming(folder: Path, changes: dict[str, Any], steps: int) -> None:
    """Check that a training which is left after some steps and resumed is the same to the bit as a whole one."""
    total = 3 * STEPS
    values = training(**changes, max_train_steps=total)
    whole, weights = run(values)
    run({**values, "max_train_steps": steps}, folder)
    seed_generators(99, 0)  # what a new process draws from does not matter
    resumed, weights_of_resumed = run_without_seed(values, folder)
    assert resumed["finished_train_steps"] == whole["finished_train_steps"] == total
    assert resumed["train_loss"] == whole["train_loss"]
    assert_equal(weights, weights_of_resumed)
