"""Mistakes with the engine are errors before training, which say what to do. `Engine.memory` measures, `describe` has a table."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import raysgd
from raysgd.engine import composing
from raysgd.errors import ConfigError, UnknownArgumentError, UsageError
from support import groups
from support.engine_steps import session_of

pytestmark = pytest.mark.usefixtures("group")


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_strategy_that_does_not_exist() -> None:
    with pytest.raises(UnknownArgumentError, match=r"zero_stages.*did you mean 'zero_stage'|zero_stage"):
        raysgd.Engine(zero_stages=2)


WRONG_VALUES = {
    "precision": "fp8",
    "loss_scale": 0.0,
    "zero_stage": True,
    "cpu_offload": 1,
    "tensor_parallel": 0,
    "sequence_parallel": "yes",
    "pipeline_parallel": 0,
    "micro_batches": 0,
    "pipeline_schedule": "2F2B",
    "accumulation_steps": 0,
    "activation_checkpointing": "all",
    "clip_grad_norm": 0.0,
    "compile": "all",
    "fused_optimizer": 1,
    "find_unused_parameters": 1,
    "weighted_gradients": "no",
    "plan": "best",
    "memory_per_device": 999_999,
}


def test_settings_are_off_by_default() -> None:
    config = {each.name: each.default for each in fields(raysgd.EngineConfig)}
    given = {name: value for name, value in config.items() if value is not None and value is not False}
    assert given == {
        "precision": "fp32",
        "loss_scale": 65536.0,
        "zero_stage": 0,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "accumulation_steps": 1,
    }


def test_names_of_the_package_are_listed() -> None:
    assert {"EngineConfig", "MemoryUse", "predict_memory"} <= set(dir(raysgd.engine))


def test_wrong_value_of_each_setting_is_refused_by_its_name() -> None:
    assert list(WRONG_VALUES) == [each.name for each in fields(raysgd.EngineConfig)]
    for name, value in WRONG_VALUES.items():
        with pytest.raises(ConfigError, match=f"^{name}={value!r} is "):
            raysgd.Engine(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 4}, "give 0, 1, 2 or 3"),
        ({"cpu_offload": True, "zero_stage": 2}, "cpu_offload=True needs zero_stage=3, and zero_stage is 2"),
        ({"sequence_parallel": True}, "needs tensor_parallel=2 or more"),
        ({"micro_batches": 2}, "pipeline_parallel is 1"),
        ({"pipeline_schedule": "GPipe"}, "needs pipeline_parallel=2 or more"),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "zero_stage": 3},
            "torch cannot do with zero_st",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "compile": "model"},
            "cannot do with compile='m",
        ),
        (
            {"pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True, "pipeline_schedule": "LoopedBFS"},
            'give "1F1B" or "GPipe"',
        ),
        ({"memory_per_device": 80}, "give 80e9 for 80 GB"),
        ({"memory_per_device": 1000}, "give 1000e6 for 1000 MB"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raysgd.Engine(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"memory_per_device": 1e6},
        {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "pipeline_schedule": "GPipe"},
        {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "zero_stage": 2, "micro_batches": 1},
    ],
    ids=str,
)
def test_settings_that_fit_are_taken(settings: dict[str, Any]) -> None:
    assert raysgd.EngineConfig(**settings).given() == settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lr_scheduler": None},
            "no argument 'lr_scheduler': use lr_scheduler_fn=, a function that makes the scheduler",
        ),
        ({"val_loader": None}, "no argument 'val_loader': use eval_dataloader="),
        ({"optimiser": None}, r"no argument 'optimiser' \(did you mean 'optimizer'\?\)"),
    ],
)
def test_argument_that_compose_does_not_have_is_refused_with_the_right_one(change: Any, message: str) -> None:
    with pytest.raises(UnknownArgumentError, match=message):
        raysgd.Engine().compose(model=make_model(), **change)


def test_parts_without_their_names_are_refused() -> None:
    model: Any = make_model()
    compose: Any = raysgd.Engine().compose
    with pytest.raises(
        UnknownArgumentError,
        match=r"^engine\.compose\(<Sequential>\) gives a value without its name; write engine\.compose\(model=\.\.\., opt",
    ):
        compose(model, sgd(model))


def test_model_on_two_devices() -> None:
    model = make_model()
    model[0].to("meta")
    with pytest.raises(ConfigError, match=r"on 2 devices \(cpu, meta\).*make it on one device"):
        raysgd.Engine().compose(model=model)


def test_stages_on_gpus_without_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would send from a GPU's address, which ends the process. The GPU is pretended."""
    monkeypatch.setattr(composing, "device", lambda: torch.device("cuda", 0))
    stages = SimpleNamespace(get_group=lambda: torch.distributed.group.WORLD)
    mesh: Any = {"pp": stages}
    with pytest.raises(ConfigError, match=r"pipeline_parallel=2 sends tensors of GPUs.*gpus_per_worker=1"):
        composing._split(raysgd.EngineConfig(pipeline_parallel=2), lambda: mesh, make_model())


def test_model_without_values() -> None:
    with pytest.raises(ConfigError, match="on the meta device, where parameters have no values"):
        raysgd.Engine().compose(model=make_model().to("meta"))


def test_model_that_is_wrapped_already() -> None:
    wrapped = nn.parallel.DistributedDataParallel(make_model())
    with pytest.raises(ConfigError, match="wrapped by DistributedDataParallel already"):
        raysgd.Engine().compose(model=wrapped)


def test_scheduler_that_is_bound_to_another_optimizer() -> None:
    model = make_model()
    optimizer, other = sgd(model), sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ConfigError, match=r"StepLR that belongs to an optimizer already; give a function"):
        raysgd.Engine().compose(model=model, optimizer=optimizer, lr_scheduler_fn=scheduler)
    with pytest.raises(ConfigError, match="lr_scheduler_fn made a StepLR for another optimizer"):
        raysgd.Engine().compose(
            model=model,
            optimizer=optimizer,
            lr_scheduler_fn=lambda _: torch.optim.lr_scheduler.StepLR(other, 1),
        )


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_optimizer_of_other_parameters(zero_stage: int) -> None:
    with pytest.raises(ConfigError, match=r"SGD has parameters that are not the model's.*model.parameters\(\)"):
        raysgd.Engine(zero_stage=zero_stage).compose(model=make_model(), optimizer=sgd(make_model()))


def test_scheduler_without_an_optimizer() -> None:
    with pytest.raises(ConfigError, match="lr_scheduler_fn needs an optimizer"):
        raysgd.Engine().compose(
            model=make_model(), lr_scheduler_fn=partial(torch.optim.lr_scheduler.StepLR, step_size=1)
        )


def test_memory_is_that_of_the_tensors() -> None:
    model = make_model()
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    engine = raysgd.Engine()
    with pytest.raises(UsageError, match=r"call engine\.compose"):
        engine.memory()
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert vars(engine.memory()) == {
        "parameters": num_bytes,
        "gradients": 0,
        "optimizer": 0,
        "kept_activations": None,
    }
    engine.backward(model(torch.randn(4, 6)).mean())
    optimizer.step()
    use = engine.memory()
    assert (use.parameters, use.gradients) == (num_bytes, num_bytes)
    assert use.optimizer == 2 * num_bytes + 4 * 4  # two moments, and a count of steps for each parameter
    assert use.total == use.parameters + use.gradients + use.optimizer


def test_shared_memory_counts_once() -> None:
    model: Any = make_model()
    model.append(nn.Linear(10, 1))
    model[3].weight = model[2].weight
    engine = raysgd.Engine()
    engine.compose(model=model)
    assert engine.memory().parameters == 4 * (6 * 10 + 10 + 10 + 1 + 1)


def test_memory_prints_a_table() -> None:
    use = raysgd.engine.MemoryUse(parameters=4_000_000, gradients=0, optimizer=8_000_000)
    rows = str(use).splitlines()
    assert rows[0].split() == ["MB", "measured"]
    assert [row.split()[-1] for row in rows[1:]] == ["4.000", "0.000", "8.000", "12.000"]
    assert use.table(predicted=use).splitlines()[-1].split() == ["total", "12.000", "12.000"]


class Stacked(nn.Module):
    """Two blocks that repeat, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_model() for _ in range(2))
        self.last = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(sum(block(x) for block in self.blocks))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("strategies", "expected"),
    [
        ({}, {"(model)": "nothing"}),
        ({"accumulation_steps": 2, "clip_grad_norm": 1.0}, {"(model)": "nothing"}),
        ({"compile": "model"}, {"(model)": "compiled"}),
        ({"compile": "blocks"}, {"blocks.0": "compiled", "blocks.1": "compiled"}),
        (
            {"activation_checkpointing": "full", "compile": "blocks"},
            dict.fromkeys(("blocks.0", "blocks.1"), "full activation checkpointing; compiled"),
        ),
        (
            {"activation_checkpointing": "selective", "precision": "bf16", "compile": "model"},
            {
                "blocks.0": "selective activation checkpointing",
                "(model)": "autocast to bf16; compiled",
            },
        ),
        ({"precision": "bf16-true"}, {"(model)": "parameters in bf16, master weights in fp32"}),
        ({"zero_stage": 1}, {"(model)": "nothing"}),  # one rank has nothing to divide
    ],
)
def test_table_has_what_was_done_to_each_module(strategies: dict[str, Any], expected: dict[str, str]) -> None:
    engine, model = raysgd.Engine(**strategies), Stacked()
    engine.compose(model=model, optimizer=sgd(model))
    head, *rows = (re.split(r" {2,}", line) for line in engine.describe().splitlines())
    assert head == ["module", "done to it"]
    assert dict(rows) == expected
    assert len(rows) == len(expected)


def test_zero_stage_without_a_process_group() -> None:
    groups.leave()
    try:
        with session_of(0, 2), pytest.raises(UsageError, match=r"needs a torch process group.*backend='torch'"):
            raysgd.Engine(zero_stage=2)
        with session_of(0, 2), pytest.raises(UsageError, match=r"needs a torch process group.*backend='torch'"):
            raysgd.accelerate(make_model(), zero_stage=3)
    finally:
        groups.enter()


def test_checkpoint_without_the_gradients_of_an_unfinished_step_is_refused(tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        engine, model = raysgd.Engine(accumulation_steps=2), make_model()
        model, optimizer, *_ = engine.compose(model=model, optimizer=sgd(model))
        saved = {"model": model, "optimizer": optimizer}
        raysgd.save_checkpoint(saved)
        for _ in range(2):  # steps of two batches
            engine.backward(model(torch.ones(2, 6)).mean())
            optimizer.step()
            with pytest.raises(UsageError, match=r"does not save the gradients of batches.*engine\.save_checkpoint"):
                raysgd.save_checkpoint(saved)
            engine.save_checkpoint()
            engine.backward(model(torch.ones(2, 6)).mean())
            with pytest.raises(UsageError, match=r"call it after optimizer\.step\(\) of a complete step"):
                raysgd.save_checkpoint(saved)
            optimizer.step()
            raysgd.save_checkpoint(saved)
            optimizer.zero_grad()
            raysgd.save_checkpoint(saved)
        assert len(raysgd.list_checkpoints()) == 7
