"""What forward passes keep for backward passes: measured on one worker, and predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import raysgd
from support import groups
from support.engine_steps import NUM_FEATURES, Model, make_rows, session_of

WIDTH, DEPTH, NUM_ROWS = 16, 3, 24


def compose(model: nn.Module, **strategies: Any) -> tuple[Any, Any]:
    engine = raysgd.Engine(**strategies)
    model, *_ = engine.compose(model=model)
    return engine, model


def test_activations_are_what_autograd_saves_once_without_the_batch() -> None:
    engine, model = compose(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.Flatten(0)))
    x = torch.randn(10, 8)
    assert engine.memory().kept_activations is None
    with engine.measure_activations():
        engine.backward(model(x).square().sum())
    # ReLU and the second layer save the same tensor; its output is saved by `square`.
    expected = 10 * (32 + 4) * 4
    assert engine.memory().kept_activations == expected
    engine.backward(model(torch.randn(100, 8)).square().sum())  # another step is not measured
    use = engine.memory()
    assert use.kept_activations == expected
    assert use.total == use.parameters + use.gradients + use.optimizer + expected


def test_largest_of_several_steps_counts() -> None:
    engine, model = compose(nn.Linear(8, 4))
    with engine.measure_activations():
        for num_rows in (10, 30, 20):
            engine.backward(model(torch.randn(num_rows, 8)).square().sum())
    assert engine.memory().kept_activations == 30 * 4 * 4


@pytest.mark.parametrize("kind", [None, "full", "selective"])
def test_measured_activations_are_those_of_the_prediction(kind: Any) -> None:
    def make() -> nn.Module:
        return Model(WIDTH, DEPTH)

    def loss_of(model: nn.Module, rows: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(rows[0]), rows[1])

    rows = tuple(each[:NUM_ROWS] for each in make_rows())
    engine, model = compose(make(), activation_checkpointing=kind)
    with engine.measure_activations():
        engine.backward(loss_of(model, rows))
    use = engine.memory()
    config = raysgd.EngineConfig(activation_checkpointing=kind)
    found = raysgd.engine.predict_memory(make, rows, config, 1, loss_fn=loss_of, device="cpu")
    assert found.kept_activations == pytest.approx(use.kept_activations, rel=0.05)
    row = next(line for line in use.table(predicted=found).splitlines() if line.startswith("kept activations"))
    assert row.split()[2:] == [f"{size / 1e6:.3f}" for size in (use.kept_activations, found.kept_activations)]


def test_selective_checkpointing_is_halfway_between_none_and_full() -> None:
    def measure_step(kind: Any) -> tuple[int, int]:
        engine, model = compose(Model(WIDTH, 6), activation_checkpointing=kind)
        with engine.measure_activations(), FlopCounterMode(display=False) as flops:
            engine.backward(model(torch.randn(10, NUM_FEATURES)).square().sum())
        return engine.memory().kept_activations, flops.get_total_flops()

    (kept_none, flops_none), (kept_half, flops_half), (kept_full, flops_full) = map(
        measure_step, (None, "selective", "full")
    )
    assert kept_none - kept_half == kept_half - kept_full > 0
    assert flops_full - flops_half == flops_half - flops_none > 0


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_prediction_knows_that_a_model_without_blocks_is_recomputed_as_a_whole(kind: Any) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).relu()).square().mean()

    engine, model = compose(Loss(), activation_checkpointing=kind)
    with engine.measure_activations():
        engine.backward(model(torch.randn(10, 8)))
    config = raysgd.EngineConfig(activation_checkpointing=kind)
    found = raysgd.engine.predict_memory(Loss, torch.randn(10, 8), config, 1, device="cpu")
    assert engine.memory().kept_activations == 4, "the loss"
    assert found.kept_activations <= 4


@pytest.mark.usefixtures("group")
def test_gradients_between_two_batches_of_a_step_are_counted_once() -> None:
    with groups.one_of_several(2), session_of(0, 2):
        model: nn.Module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        engine = raysgd.Engine(zero_stage=2, accumulation_steps=2)
        model, *_ = engine.compose(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            engine.backward(model(torch.randn(3, 8)).sum())
            # The shards of a bucket have one tensor, with a flag for each parameter.
            assert engine.memory().gradients == pytest.approx(4 * (4 * 36 + 8), abs=32)


def test_activations_need_a_model() -> None:
    with pytest.raises(raysgd.errors.UsageError, match="compose"), raysgd.Engine().measure_activations():
        pass
