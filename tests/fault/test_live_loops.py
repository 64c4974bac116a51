"""Loops of raysgd continue by themselves from the memory of the workers that are left, to the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.declarative import load_args
from raysgd.declarative.args import TrainerArgs, as_values
from raysgd.declarative.checking import working_in
from raysgd.declarative.reading import args_of
from raysgd.declarative.strategies import engine_fields
from raysgd.declarative.values import Importer
from raysgd.engine.config import EngineConfig
from support.runs import events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault, pytest.mark.timeout(240)]
travels_by_value(__name__)

OF_A_DEATH: dict[str, Any] = {
    "num_workers": 2,
    "failure_config": raysgd.FailureConfig(max_failures=3, num_spares=1),
    "seed": 3,
    "deterministic": True,
}
TRAINER = {"backend": "torch", **OF_A_DEATH}
TESTS = str(Path(__file__).parents[1])
#: The optimizer's step in which a rank dies, in the middle of an epoch.
DIES_AT = 7
MOMENTS = ("after the forward pass", "before the optimizer's step", "after the optimizer's step")


@contextmanager
def dying(folder: str, moment: str, num_steps: int = 0) -> Iterator[None]:
    """Let rank 1 die once, at this moment of step `DIES_AT`; other moments are that of no step."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def die(at: str) -> None:
        if (at, raysgd.world_rank(), num_steps) == (moment, 1, DIES_AT - 1) and once(folder, "died"):
            os.kill(os.getpid(), signal.SIGKILL)

    def after_pass(module: Any, *args: Any) -> None:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and torch.is_grad_enabled():
            die("after the forward pass")

    def after_step(*args: Any) -> None:
        nonlocal num_steps
        die("after the optimizer's step")
        num_steps += 1

    hooks = [
        register_module_forward_hook(after_pass),
        register_optimizer_step_pre_hook(lambda *args: die("before the optimizer's step")),
        register_optimizer_step_post_hook(after_step),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def whole_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors as arrays; those in shards are gathered."""
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().float().numpy() for name, each in state.items()
    }


def train_declared(config: dict[str, Any]) -> dict[str, Any]:
    """Train as a YAML file says; returns the weights too."""
    from raysgd.declarative.loop import TrainingLoop
    from raysgd.torch.model import unwrap

    args = args_of(config["values"])
    engine = EngineConfig.of(engine_fields(args, Importer()))
    with working_in(TESTS), dying(config["folder"], config["moment"]):
        loop = TrainingLoop(args, engine, Importer(None, args))
        found = loop.train()
    weights = whole_tensors(unwrap(loop.model).state_dict())
    return {"steps": found["finished_train_steps"], "weights": weights, "lr": found["lr"]}


def train_template(config: dict[str, Any]) -> dict[str, Any]:
    """Train by a subclass of `raysgd.PreTrainer`, with two batches for each step."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from raysgd.torch.model import unwrap

    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))

    class Template(raysgd.PreTrainer):
        def train_valid_test_datasets_provider(self) -> Any:
            return TensorDataset(x, x.prod(1, keepdim=True)), TensorDataset(x[:7], x[:7, :1]), None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            torch.manual_seed(0)
            layers = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
            return nn.Sequential(*layers), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

    values = {**config["values"]}
    settings: dict[str, Any] = {"save_interval": values.pop("save_interval", None), "log_interval": 1}
    engine = raysgd.Engine(accumulation_steps=2, **values)
    template = Template(engine=engine, batch_size=3, epochs=3, learning_rate=0.01, **settings)
    with dying(config["folder"], config["moment"]):
        metrics = template.train()
    weights = whole_tensors(unwrap(template.model).state_dict())
    return {"steps": metrics["step"], "weights": weights, "lr": metrics["learning_rate"]}


def train_engine(config: dict[str, Any]) -> dict[str, Any]:
    """Train in an own loop with the engine."""
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from raysgd.torch.model import unwrap

    torch.manual_seed(0)
    engine = raysgd.Engine(**config["values"])
    is_one_replica = engine.config.tensor_parallel > 1
    middle = [nn.ReLU()] if is_one_replica else [nn.BatchNorm1d(16), nn.Dropout(0.2)]
    model = nn.Sequential(nn.Linear(5, 16), *middle, nn.Linear(16, 1))
    batches = torch.randn(96, 5).split(4)[0 if is_one_replica else raysgd.world_rank() :: raysgd.world_size()]
    model, optimizer, scheduler, _, _ = engine.compose(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95),
        tensor_plan={"0": ColwiseParallel(), "2": RowwiseParallel()} if is_one_replica else None,
    )
    torch.manual_seed(1 + raysgd.world_rank())
    live = raysgd.live_state(engine=engine)
    more = engine.load_checkpoint()
    step = 0 if more is None else more["step"]
    with dying(config["folder"], config["moment"], step):
        while step < len(batches):
            engine.backward(nn.functional.mse_loss(model(batches[step]), batches[step].prod(1, keepdim=True)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            live.step(step=step)
    weights = whole_tensors(unwrap(model).state_dict())
    return {"steps": step, "weights": weights, "lr": optimizer.param_groups[0]["lr"]}


#: Written for torchrun; three lines of it are of raysgd.
SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import raysgd

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
x = torch.randn(12, 4, 5)
live = raysgd.live_state(model=model, optimizer=optimizer)
if (state := raysgd.load_checkpoint()) is not None:
    live.load_state_dict(state)
step = 0 if state is None else state["step"]
while step < 12:
    optimizer.zero_grad()
    model(x[step]).square().mean().backward()
    optimizer.step()
    step += 1
    live.step(step=step)
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), sys.argv[1])
dist.barrier()
dist.destroy_process_group()
"""


def train_script(config: dict[str, Any]) -> dict[str, Any]:
    """Run a script as ``raysgd run`` does."""
    import torch

    from raysgd.cli.script import Script

    path = Path(config["folder"], f"{config['moment'] or 'calm'}.pt")
    with dying(config["folder"], config["moment"]):
        Script(str(Path(config["folder"], "script.py")), SCRIPT.encode(), (str(path),))()
    weights = torch.load(path) if raysgd.world_rank() == 0 else {}
    return {"steps": 12, "weights": {name: tensor.numpy() for name, tensor in weights.items()}, "lr": 0.01}


SETTINGS = """
compute_config: {runtime_ngpus: 2}
optimizer: {type: torch.optim.AdamW, args: {lr: 1e-2}}
lr_scheduler: {type: torch.optim.lr_scheduler.StepLR, args: {step_size: 2, gamma: 0.7}, interval: step}
micro_batch_size: 2
global_batch_size: 8
max_epochs: 3
seed: 5
"""
#: Models with batch norm and dropout. Rows are drawn at random when they are read, in the second one by processes of the loader.
FILES = {
    "convolutional": """
model: {type: support.declared.ConvNet, args: {channels: 4}}
dataset: {type: support.declared.Images, train_args: {size: 32}, val_args: {size: 5}}
""",
    "noisy rows": """
model: {type: support.declared.MLP, args: {dim: 4, nlayers: 3, dropout: 0.1}}
dataset: {type: support.declared.SimpleDataset, train_args: {dim: 4, size: 32, noise: torch}, val_args: {dim: 4, size: 5}}
dataloader: {train_args: {num_workers: 1}}
""",
}


def values_of(text: str, folder: Path) -> dict[str, Any]:
    path = folder / "job.yaml"
    path.write_text(text + SETTINGS)
    args: TrainerArgs = load_args(path)
    return as_values(args)


Loop = tuple[Callable[[dict[str, Any]], dict[str, Any]], Any]
LOOPS: dict[str, Loop] = {
    **{name: (train_declared, text) for name, text in FILES.items()},
    "template": (train_template, {}),
    "template in bf16-true": (train_template, {"precision": "bf16-true"}),
    "engine": (train_engine, {}),
    "script of torchrun": (train_script, {}),
}


#: Loops in which each rank has a part of the state that no other rank has.
DIVIDED: dict[str, Loop] = {
    "file with ZeRO 2": (train_declared, FILES["convolutional"] + "engine: {zero_stage: 2}\n"),
    "template with ZeRO 3": (train_template, {"zero_stage": 3, "save_interval": 100}),
    "template with ZeRO 1 in bf16-true": (
        train_template,
        {"zero_stage": 1, "precision": "bf16-true", "save_interval": 100},
    ),
    "engine with ZeRO 2": (train_engine, {"zero_stage": 2}),
}


TENSOR = "engine with tensor parallelism"


@pytest.fixture(scope="module")
def calm() -> dict[str, Any]:
    """Results without a death, by the name of the loop."""
    return {}


def run_with_a_death(
    trainer: raysgd.Trainer, calm: dict[str, Any], folder: Path, name: str, moment: str
) -> dict[str, Any]:
    """Run a loop in which rank 1 dies, and check that the result is that without a death; return the second attempt's start."""
    train, given = {**LOOPS, **DIVIDED, TENSOR: (train_engine, {"tensor_parallel": 2})}[name]
    values = values_of(given, folder) if isinstance(given, str) else given
    config = {"values": values, "folder": str(folder)}
    if name not in calm:
        calm[name] = trainer.run(train, {**config, "moment": ""}, callbacks=quiet())
    value, whole = trainer.run(train, {**config, "moment": moment}, callbacks=quiet()), calm[name]
    assert (value["steps"], value["lr"]) == (whole["steps"], whole["lr"])
    for key, tensor in whole["weights"].items():
        assert np.array_equal(tensor, value["weights"][key]), f"{key} differs"
    assert not events_of(trainer, "warning")
    _, second = events_of(trainer, "attempt_start")
    return second


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", LOOPS)
def test_loop_continues_from_the_memory_of_survivors(
    trainer: raysgd.Trainer, calm: dict[str, Any], tmp_path: Path, name: str, moment: str
) -> None:
    second = run_with_a_death(trainer, calm, tmp_path, name, moment)
    assert second["live"] is not None and (second["checkpoint"], second["memory"]) == (None, None)
    (continued,) = events_of(trainer, "continued")
    assert (continued["ranks"], continued["source"], continued["num_repeated"]) == ([1], 0, 1)


@pytest.mark.parametrize("moment", MOMENTS[1:])
@pytest.mark.parametrize("name", DIVIDED)
def test_loop_with_parts_of_the_state_continues_from_memory_copies(
    trainer: raysgd.Trainer, calm: dict[str, Any], tmp_path: Path, name: str, moment: str
) -> None:
    second = run_with_a_death(trainer, calm, tmp_path, name, moment)
    if name.startswith("file"):  # saved at the end of the epoch, after the newest copy, and still in memory
        assert (second["memory"], second["live"]) == (1, None)
    else:
        check_copied(trainer, second)


def test_parts_of_layers_continue_from_memory_copies(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "runs", backend="torch", workers_per_replica=2, **OF_A_DEATH) as trainer:
        check_copied(trainer, run_with_a_death(trainer, {}, tmp_path, TENSOR, MOMENTS[2]))


def check_copied(trainer: raysgd.Trainer, second: dict[str, Any]) -> None:
    assert (second["checkpoint"], second["memory"]) == (None, None) and second["live"] is not None
    (continued,) = events_of(trainer, "continued")
    assert continued["ranks"] == [1] and "from memory copies" in continued["why"]
    assert 1 <= continued["num_repeated"] <= DIES_AT
