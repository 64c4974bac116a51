"""Every pair of strategies trains to the losses of the plain loop in one process; ``make matrix`` runs all combinations."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from support import engine_compiled, engine_overflow, engine_steps
from support.pairs import all_pairs, product
from support.torch_ranks import RankGroup

pytestmark = pytest.mark.timeout(1800)

NUM_RANKS = 4
FACTORS: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16", "bf16-true"),
    "zero_stage": (0, 1, 2, 3),
    "tensor_parallel": (1, 2),
    "pipeline_parallel": (1, 2),
    "activation_checkpointing": (None, "full", "selective"),
    "accumulation_steps": (1, 2),
    "clip_grad_norm": (None, 0.5),
}
#: The largest relative difference of a loss over 20 steps. That of the reduced precisions is some 20 times what is seen.
BOUNDS = {"fp32": 1e-5, "bf16": 1e-3, "bf16-true": 1e-3, "fp16": 1e-3}
CHOSEN = list(product(FACTORS)) if os.environ.get("RAYSGD_MATRIX") == "all" else all_pairs(FACTORS)


def name_of(combination: dict[str, Any]) -> str:
    return "-".join(f"{name.split('_')[0]}={value}" for name, value in combination.items() if value is not None)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(NUM_RANKS) as group:
        yield group


@functools.cache
def plain(clip: float | None) -> list[float]:
    return engine_steps.train_language_plainly("gpt2", clip=clip)


@pytest.mark.parametrize("combination", CHOSEN, ids=name_of)
def test_losses_are_those_of_the_plain_loop(ranks: RankGroup, combination: dict[str, Any]) -> None:
    strategies = {**combination, "loss_scale": 64.0}  # gradients do not overflow, so no step is skipped
    for losses in ranks.run(engine_steps.train_language, "gpt2", **strategies):
        assert losses == pytest.approx(plain(combination["clip_grad_norm"]), rel=BOUNDS[combination["precision"]])


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_other_models_train_to_the_same_losses(ranks: RankGroup, kind: str) -> None:
    strategies = {"tensor_parallel": 2, "pipeline_parallel": 2, "activation_checkpointing": "full"}
    expected = engine_steps.train_language_plainly(kind)
    for losses in ranks.run(engine_steps.train_language, kind, **strategies):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "strategies",
    [
        {"zero_stage": 1, "weighted_gradients": True},
        {"zero_stage": 3, "cpu_offload": True, "accumulation_steps": 2},
        {"zero_stage": 0, "fused_optimizer": True},
        {"zero_stage": 2, "fused_optimizer": True, "clip_grad_norm": 0.3},
        {"zero_stage": 3, "scheduler_first": True, "accumulation_steps": 2},
        {"zero_stage": 1, "scheduler_first": True},
        {"clip_by_hand": 0.3, "zero_stage": 2, "accumulation_steps": 3},
    ],
    ids=str,
)
def test_any_model_with_scalars_and_frozen_parameters(ranks: RankGroup, strategies: dict[str, Any]) -> None:
    expected = engine_steps.train_plainly(
        12,
        batch=24,
        clip=strategies.get("clip_grad_norm", strategies.get("clip_by_hand")),
        scheduler_first=strategies.get("scheduler_first", False),
    )
    for found in ranks.run(engine_steps.train, 12, batch=24, **strategies):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_are_those_of_the_mean_over_all_rows(ranks: RankGroup, zero_stage: int) -> None:
    sizes = [[1, 7], [4, 2], [3, 3], [9, 1]]
    expected = engine_steps.train_evenly(6, sum(map(sum, sizes)))
    for found in ranks.run(engine_steps.train_uneven, 6, sizes, zero_stage=zero_stage):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("num_rows", [33, 30], ids=["a rank without rows", "repeated rows"])
@pytest.mark.parametrize(
    "strategies",
    [
        {},
        {"zero_stage": 1, "accumulation_steps": 2},
        {"zero_stage": 2, "has_weight": True},
        {"zero_stage": 3},
        {"pipeline_parallel": 2},
        {"tensor_parallel": 2, "zero_stage": 2},
    ],
    ids=str,
)
def test_rows_that_the_loader_repeats_do_not_count(ranks: RankGroup, strategies: dict[str, Any], num_rows: int) -> None:
    copies = NUM_RANKS // (strategies.get("pipeline_parallel", 1) * strategies.get("tensor_parallel", 1))
    whole_step = 16 * strategies.get("accumulation_steps", 1)
    expected = engine_steps.train_on_rows("gpt2", num_rows, whole_step)
    for losses in ranks.run(engine_steps.train_on_loader, "gpt2", num_rows, 16 // copies, **strategies):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_pipeline_refuses_a_weight_that_comes_too_late(ranks: RankGroup) -> None:
    with pytest.raises(
        AssertionError, match=r"UsageError: with pipeline_parallel .* leave out engine\.backward\(weight"
    ):
        ranks.run(engine_steps.train_on_loader, "gpt2", 16, 8, has_weight=True, pipeline_parallel=2)


OVERFLOWS = (0, 3)


@functools.cache
def plain_with_skipped_steps() -> tuple[list[float], list[float]]:
    return engine_overflow.train_plainly(8, OVERFLOWS)


@pytest.mark.parametrize("scheduler_first", [False, True], ids=["optimizer first", "scheduler first"])
@pytest.mark.parametrize(
    ("where", "strategies"),
    [
        ("backward", {}),
        ("backward", {"zero_stage": 2}),
        ("backward", {"zero_stage": 3}),
        ("backward", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("gradient", {"zero_stage": 2}),
        ("gradient", {"zero_stage": 3}),
        ("gradient", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ],
    ids=str,
)
def test_step_is_skipped_by_all_ranks_if_gradients_of_one_overflow(
    ranks: RankGroup, where: str, strategies: dict[str, Any], scheduler_first: bool
) -> None:
    losses, rates = plain_with_skipped_steps()
    found = ranks.run(engine_overflow.train, 8, OVERFLOWS, where=where, scheduler_first=scheduler_first, **strategies)
    for own_losses, own_rates, scale in found:
        assert own_losses == pytest.approx(losses, rel=BOUNDS["fp16"])
        assert own_rates == pytest.approx(rates), "the scheduler does not count a skipped step"
        assert scale == 1024.0 / 2 ** len(OVERFLOWS)


@pytest.mark.parametrize(
    ("backend", "strategies"),
    [
        ("aot_eager", {"compile": "model"}),
        ("aot_eager", {"compile": "blocks", "accumulation_steps": 2}),
        ("aot_eager", {"compile": "model", "zero_stage": 1, "accumulation_steps": 2}),
        ("aot_eager", {"compile": "model", "zero_stage": 2}),
        ("aot_eager", {"compile": "blocks", "zero_stage": 2, "accumulation_steps": 2}),
        ("aot_eager", {"compile": "model", "zero_stage": 3}),
        ("aot_eager", {"compile": "blocks", "zero_stage": 3, "activation_checkpointing": "full"}),
        ("aot_eager", {"compile": "model", "tensor_parallel": 2}),
        ("aot_eager", {"compile": "blocks", "tensor_parallel": 2, "zero_stage": 3}),
        ("aot_eager", {"compile": "model", "pipeline_parallel": 2}),
        ("aot_eager", {"compile": "blocks", "pipeline_parallel": 2}),
        ("inductor", {"compile": "blocks", "zero_stage": 2}),
    ],
    ids=str,
)
def test_compiled_models_train_to_the_same_losses(ranks: RankGroup, backend: str, strategies: dict[str, Any]) -> None:
    if backend == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("torch's inductor needs a C++ compiler")
    for losses, num_compiled in ranks.run(engine_compiled.train, "gpt2", 4, backend, **strategies):
        assert losses == pytest.approx(plain(None)[:4], rel=1e-5)
        assert num_compiled > 0
