"""Strategies train to the losses of the plain loop: pairs of them in ``make nightly``, all combinations in ``make matrix``."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import engine_compiled, engine_overflow, engine_steps, tensor_habits, torch_ranks
from support.matrix_page import Deviations
from support.pairs import all_pairs, product
from support.poll import until
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
IS_WHOLE = os.environ.get("RAYSGD_MATRIX") == "all"
NUM_STEPS = int(os.environ.get("RAYSGD_MATRIX_STEPS", "20"))
#: The largest relative difference of a loss. That of the reduced precisions is some 20 times what is seen.
BOUNDS = {"fp32": 1e-5, "bf16": 1e-3, "bf16-true": 1e-3, "fp16": 1e-3}
#: The same for a parameter, in relation to how far the plain loop moved it. A wrong gradient makes a difference of about 1, one
#: rounding of a norm's weight makes one of 1e-4. Parameters of bf16-true are rounded to 8 bits, and are not compared.
PARAMETER_BOUNDS = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
CHOSEN = list(product(FACTORS)) if IS_WHOLE else all_pairs(FACTORS)


def name_of(combination: dict[str, Any]) -> str:
    return "-".join(f"{name.split('_')[0]}={value}" for name, value in combination.items() if value is not None)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(NUM_RANKS) as group:
        yield group


@pytest.fixture(scope="module")
def deviations() -> Iterator[Deviations]:
    found = Deviations(FACTORS, BOUNDS, PARAMETER_BOUNDS, NUM_STEPS)
    yield found
    if page := os.environ.get("RAYSGD_MATRIX_PAGE"):
        found.write(Path(page), len(CHOSEN))


@pytest.mark.nightly
@pytest.mark.parametrize("combination", CHOSEN, ids=name_of)
def test_losses_and_parameters_are_those_of_the_plain_loop(
    ranks: RankGroup, deviations: Deviations, combination: dict[str, Any]
) -> None:
    strategies = {**combination, "loss_scale": 64.0}  # gradients do not overflow, so no step is skipped
    precision = combination["precision"]
    found = ranks.run(engine_steps.compare_language, "gpt2", NUM_STEPS, **strategies)
    loss, parameter = (max(values) for values in zip(*found, strict=True))
    assert loss <= BOUNDS[precision] and parameter <= PARAMETER_BOUNDS.get(precision, math.inf)
    deviations.add(combination, loss, parameter)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_bf16_parameters_start_as_those_of_the_first_rank(ranks: RankGroup, zero_stage: int) -> None:
    found = ranks.run(engine_steps.compare_language, "gpt2", 2, precision="bf16-true", zero_stage=zero_stage)
    for loss, parameter in found:  # rounding to bf16 undoes small movements; other weights make differences of 40
        assert loss <= BOUNDS["bf16-true"] and parameter <= 2


@pytest.mark.parametrize(
    "strategies",
    [
        {},
        {"zero_stage": 1},
        {"zero_stage": 2, "tensor_parallel": 2, "accumulation_steps": 2},
        {"zero_stage": 3, "activation_checkpointing": "full"},
        {"tensor_parallel": 2, "pipeline_parallel": 2, "precision": "fp16"},
        {"zero_stage": 3, "compile": "blocks"},
    ],
    ids=str,
)
def test_groups_of_a_model_that_is_dropped_are_closed(ranks: RankGroup, strategies: dict[str, Any]) -> None:
    before = ranks.run(torch_ranks.count_groups)
    if "compile" in strategies:
        ranks.run(engine_compiled.train, "gpt2", 2, "aot_eager", **strategies)
    else:
        ranks.run(engine_steps.train_language, "gpt2", 2, **strategies)
    assert until(lambda: ranks.run(torch_ranks.count_groups) == before, 20)


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


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("num_frozen", [0, 2], ids=["before the first step", "after two steps"])
def test_parameters_that_are_unfrozen_after_compose_train(ranks: RankGroup, num_frozen: int, zero_stage: int) -> None:
    expected = engine_steps.train_unfrozen_plainly(num_frozen, 6)
    for found in ranks.run(engine_steps.train_unfrozen, num_frozen, 6, zero_stage=zero_stage):
        assert found == pytest.approx(expected, rel=1e-5)


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
    expected = engine_steps.train_language_plainly("gpt2", 4)
    for losses, num_compiled in ranks.run(engine_compiled.train, "gpt2", 4, backend, **strategies):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert num_compiled > 0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_habits_of_loops_with_tensor_parallel_replicas(ranks: RankGroup, zero_stage: int) -> None:
    """Weights are exchanged by ``.data``, gradients are kept and clipped, and a layer is added."""
    expected = tensor_habits.train_plainly()
    for found in ranks.run(tensor_habits.train, zero_stage):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
